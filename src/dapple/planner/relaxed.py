"""Whether a step of T seconds can be met at all, on small clusters: layers x devices x replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dapple.cluster import Link
from dapple.costs.network import flow_rate
from dapple.planner.exposed import exposed_seconds
from dapple.planner.mixed import units_of
from dapple.planner.problem import Problem
from dapple.planner.shares import Shares, prefix
from dapple.planner.tables import CostTables, Ints
from dapple.planner.traffic import Floats, MessageBytes

_SLACK = 1e-9


@dataclass(frozen=True)
class Relaxed:
    """Costs that no plan with these numbers of micro-batches undercuts. R replica counts.

    Attributes:
        widths: shape (R,), units of speed (`dapple.planner.mixed`), devices where all are equally
            fast; others are no faster than one of these.
        both: shape (R, N + 1, N + 1): F + B of layers i..j.
        forward: shape (R, N + 1, N + 1): F.
        work: shape (R, N + 1, N + 1): W; infinite where they can't fit.
        after: shape (R, N + 1, N + 1): AllReduce and optimizer.
        work_after: work + after.
        link_both, link_forward, link_work: shape (R, R, N + 1): transfers between stages of these
            replica counts over each cut, F + B, F and W.
        linked: shape (N + 1,): whether the stages at the cut wait for each other.
        devices: units of the cluster.
    """

    widths: Ints
    both: Floats
    forward: Floats
    work: Floats
    after: Floats
    work_after: Floats
    link_both: Floats
    link_forward: Floats
    link_work: Floats
    linked: NDArray[np.bool_]
    devices: int


def relax(problem: Problem, found: Shares) -> Relaxed:
    """Relaxed costs for all M of a range of `row_ranges`."""
    speed = max(problem.speeds)
    memory = max(kind.memory for kind in problem.cluster.kind_of_device())
    tables = problem.layer_tables
    empty = np.tri(problem.num_layers + 1, dtype=np.bool_)
    work = _differences(prefix(found.work / speed))
    work[empty | (_least_bytes(problem, tables, found) > memory)] = np.inf
    after = _after(problem, tables, found, speed)
    link_both, link_forward, link_work = _links(problem, found)
    return Relaxed(
        widths=found.units,
        both=_differences(prefix((found.forward + found.backward) / speed)),
        forward=_differences(prefix(found.forward / speed)),
        work=work,
        work_after=work + after,
        after=after,
        link_both=link_both,
        link_forward=link_forward,
        link_work=link_work,
        linked=tables.linked,
        devices=units_of(problem).total,
    )


def meets(relaxed: Relaxed, target: float) -> bool:
    """Whether the relaxed costs allow a step of `target` seconds."""
    layers, options = relaxed.both.shape[1], len(relaxed.widths)
    limit = target * (1 + _SLACK)
    prefix = np.full((relaxed.devices + 1, options, layers), np.inf)
    prefix_f = np.full((relaxed.devices + 1, options, layers), np.inf)
    # The first stage begins at layer 0, and its AllReduce ends the step.
    allowed = relaxed.work[:, 0] + relaxed.after[:, 0] <= limit
    alone = np.where(allowed, relaxed.after[:, 0] + relaxed.both[:, 0], np.inf)
    alone_f = np.where(allowed, relaxed.forward[:, 0], np.inf)
    first, last = _band(relaxed, limit)
    for e in range(1, relaxed.devices + 1):
        fits, now = relaxed.widths <= e, np.flatnonzero(relaxed.widths < e)
        prefix[e, fits], prefix_f[e, fits] = alone[fits], alone_f[fits]
        starts = e - relaxed.widths[now]
        if not len(now) or first[e] > last[e]:
            continue
        some = slice(int(first[starts].min()), int(last[starts].max()) + 1)
        if some.start >= some.stop:
            continue
        before = prefix[starts, :, some], prefix_f[starts, :, some]
        base, base_f = _entered(relaxed, *before, now, some, limit)
        ends = slice(int(first[e]), int(last[e]) + 1)
        late = ~(base_f[:, :, None] + relaxed.work_after[now, some, ends] <= limit)
        late |= ~(base[:, :, None] + relaxed.work[now, some, ends] <= limit)
        for entered, own, reached in (
            (base, relaxed.both, prefix),
            (base_f, relaxed.forward, prefix_f),
        ):
            sums = entered[:, :, None] + own[now, some, ends]
            np.copyto(sums, np.inf, where=late)
            reached[e, now, ends] = np.minimum(sums.min(axis=1), reached[e, now, ends])
    return bool(prefix[:, :, -1].min() <= limit)


def _band(relaxed: Relaxed, limit: float) -> tuple[Ints, Ints]:
    """First and last cut, for each number of devices, that they can and must have come to.

    No device works for longer than the limit, and layers take some device-seconds at least.
    """
    steps = np.arange(relaxed.both.shape[1] - 1)
    least = (relaxed.work[:, steps, steps + 1] * relaxed.widths[:, None]).min(axis=0)
    done = np.concatenate([[0.0], np.cumsum(least)])
    left = np.concatenate([np.cumsum(least[::-1])[::-1], [0.0]])
    can = limit * np.arange(relaxed.devices + 1) * (1 + _SLACK)
    last: Ints = np.searchsorted(done, can, side="right") - 1
    first: Ints = len(left) - np.searchsorted(left[::-1], can[::-1], side="right")
    return first, last


def _entered(
    relaxed: Relaxed, prefix: Floats, prefix_f: Floats, now: Ints, cuts: slice, limit: float
) -> tuple[Floats, Floats]:
    """The least prefixes when a stage begins, its transfer included; shape (now, cuts).

    Args:
        relaxed: the costs.
        prefix, prefix_f: shape (now, options before, cuts), of A_0 + F + B and of F.
        now: options of the stage that begins.
        cuts: where it may begin.
        limit: what no transfer may exceed with its prefix.
    """
    both, forward, work = (
        link[:, now, cuts].swapaxes(0, 1)
        for link in (relaxed.link_both, relaxed.link_forward, relaxed.link_work)
    )
    entered = np.where(prefix + work <= limit, prefix + both, np.inf)
    entered_f = prefix_f + forward
    linked = relaxed.linked[cuts]
    if not linked.all():
        # Stages that do not wait for each other start afresh.
        apart = np.where(np.isfinite(prefix), 0.0, np.inf)
        entered = np.where(linked, entered, apart)
        entered_f = np.where(linked, entered_f, apart)
    return entered.min(axis=1), np.where(np.isfinite(entered), entered_f, np.inf).min(axis=1)


def _least_bytes(problem: Problem, tables: CostTables, found: Shares) -> Floats:
    """Parameters, gradients, optimizer state and one saved micro-batch; shape (R, N + 1, N + 1)."""
    if not problem.memory_is_known:
        return np.zeros((len(found.widths), problem.num_layers + 1, problem.num_layers + 1))
    tied = sum(group.parameter_bytes * (len(group.members) - 1) for group in problem.profile.tied)
    parameters = np.maximum(_differences(tables.parameter_prefix) - tied, 0.0)
    factors = [2 + problem.state_factor(int(most), problem.shard) for most in found.most_widths]
    saved = np.array([tables.saved_prefix(int(rows)) for rows in found.held_rows])
    return np.array(factors)[:, None, None] * parameters + _differences(saved)


def _after(problem: Problem, tables: CostTables, found: Shares, speed: float) -> Floats:
    """AllReduce behind the last backward, and optimizer, shape (R, N + 1, N + 1)."""
    layers = np.arange(problem.num_layers + 1)
    own = np.maximum(tables.own_parameter_bytes(layers[:, None], layers[None, :]), 0.0)
    update = np.maximum(_differences(tables.optimizer_prefix), 0.0) / speed
    rings = [least_rings(problem, int(width)) for width in found.widths]
    numbers = np.repeat(np.arange(len(rings)), [len(options) for options in rings])
    fixed, rate = np.array([ring for options in rings for ring in options]).T
    last = prefix(found.last_backward / speed)[numbers]
    whole = fixed[:, None, None] * tables.fewest_buckets(own)
    whole = whole + rate[:, None, None] * own - _differences(last)
    exposed = exposed_seconds(tables.untied_prefix, last, fixed, rate)
    exposed = np.maximum(exposed, np.where(own > 0, whole, 0.0))
    begins = np.searchsorted(numbers, np.arange(len(rings)))
    least: Floats = np.minimum.reduceat(exposed, begins, axis=0)
    parts = found.most_widths[:, None, None] if problem.shard else 1
    return np.maximum(least, 0.0) + update / parts


def least_rings(problem: Problem, replicas: int) -> list[tuple[float, float]]:
    """Fixed seconds and seconds per byte of the rings that may be the fastest."""
    found = problem.least_rings.get(replicas)
    if found is None:
        found = problem.least_rings[replicas] = _find_rings(problem, replicas)
    return found


def _find_rings(problem: Problem, replicas: int) -> list[tuple[float, float]]:
    if replicas == 1:
        return [(0.0, 0.0)]
    cluster, paper = problem.cluster, problem.model.network.model == "paper"
    sizes = cluster.machine_sizes()
    inside = [group.inside for group in cluster.machines]
    outside = [group.outside for group in cluster.machines if group.outside is not None]
    fast_inside = max(link.allreduce_bandwidth or link.bandwidth for link in inside)
    rings = []
    for machines in range(-(-replicas // max(sizes)), min(replicas, len(sizes)) + 1):
        most = -(-replicas // machines)
        per_byte = 2 * (most - 1) / most / fast_inside
        fixed = 2 * (most - 1) * min(link.latency for link in inside)
        if machines > 1:
            rates = [_ring_rate(link, paper) for link in outside]
            if paper:
                per_byte = 2 * (replicas - 1) / replicas / max(rates)
            else:
                per_byte += 2 * (machines - 1) / machines / max(rates)
                fixed += 2 * (machines - 1) * min(link.latency for link in outside)
        elif paper:
            per_byte = 2 * (replicas - 1) / replicas / fast_inside
        rings.append((0.0 if paper else fixed, per_byte))
    # One with more of neither is never slower.
    return [ring for n, ring in enumerate(rings) if not _is_beaten(ring, rings[:n])]


def _is_beaten(ring: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    return any(other[0] <= ring[0] and other[1] <= ring[1] for other in others)


def _ring_rate(link: Link, paper: bool) -> float:
    rate = link.allreduce_bandwidth or link.bandwidth
    return rate if paper else min(rate, link.bandwidth)


def _links(problem: Problem, found: Shares) -> tuple[Floats, Floats, Floats]:
    """Least seconds of the message between the first replicas of two stages: F + B, F, work."""
    latency, rate = best_route(problem)
    certain = problem.layer_tables.certain_bytes

    def seconds(rows: Floats, size: MessageBytes, messages: int = 1) -> Floats:
        sent = rows[:, :, None] * size.per_row + messages * size.fixed
        result: Floats = np.where(sent > 0, messages * latency + sent / rate, 0.0)
        return result

    widest = np.maximum.outer(found.most_widths, found.most_widths)
    forward = seconds(np.minimum.outer(found.first_rows, found.first_rows), certain.forward)
    backward = seconds(np.minimum.outer(found.last_rows, found.last_rows), certain.backward)
    if problem.speeds_differ:
        # Some pair of replicas exchanges the mean; two sizes of micro-batches may have other pairs.
        pairs = np.add.outer(found.most_widths, found.most_widths) - 1
        shared, messages = problem.global_batch_size / (2.0 * pairs), 1
    else:
        shared, messages = problem.global_batch_size / widest, found.low
    whole = [seconds(shared, size, messages) for size in (certain.forward, certain.backward)]
    shares_cards = problem.model.network.model != "paper" and problem.cluster.num_machines > 1
    if shares_cards and not problem.speeds_differ:
        crowded = _crowding(problem, found)[:, :, None]
        whole += [crowded * certain.forward.per_row, crowded * certain.backward.per_row]
    return forward + backward, forward, np.maximum.reduce(whole)


def _crowding(problem: Problem, found: Shares) -> Floats:
    """Rows of the whole step that pass one network card, per bandwidth; shape (R, R).

    Where k machines hold the r devices of one stage, they hold at most k m - r of the other's n;
    the others' rows pass the k cards.
    """
    sizes = problem.machine_sizes
    most = max(sizes)
    links = (group.outside for group in problem.cluster.machines)
    bandwidth = max(link.bandwidth for link in links if link is not None)
    widths, widest = found.widths[:, None], found.most_widths[:, None]
    each = _least_rows(problem.global_batch_size, found, found.most_widths)
    least = np.full((len(widths), len(widths)), np.inf)
    for machines in range(1, len(sizes) + 1):
        rows = np.maximum(widths + found.widths - machines * most, 0) * each / machines
        possible = (machines * most >= widths) & (machines <= widest)
        least = np.where(possible, np.minimum(least, rows), least)
    crowded: Floats = np.maximum(least, least.T) / bandwidth
    return crowded


def _least_rows(batch: int, found: Shares, replicas: Ints) -> Ints:
    """Rows of a step that each of so many replicas has at least."""
    rows = []
    for count in (found.low, found.high):
        size, larger = divmod(batch, count)
        rows.append(larger * ((size + 1) // replicas) + (count - larger) * (size // replicas))
    least: Ints = np.minimum(*rows)
    return least


def best_route(problem: Problem) -> tuple[float, float]:
    """The least latency and the highest rate among all pairs of devices."""
    sizes, network = problem.machine_sizes, problem.model.network
    first = np.cumsum([0, *sizes]).tolist()
    routes = [network.route(first[m], first[m] + 1) for m, size in enumerate(sizes) if size > 1]
    cards = [group.outside for group in problem.cluster.machine_groups()]
    outside = [(m, card) for m, card in enumerate(cards) if card is not None and len(sizes) > 1]
    # The worse of two cards counts: the two fastest give the highest rate, and likewise latency.
    for worst in (lambda card: -flow_rate(card), lambda card: card.latency):
        pair = sorted(outside, key=lambda end: worst(end[1]))[:2]
        if len(pair) == 2:
            routes.append(network.route(first[pair[0][0]], first[pair[1][0]]))
    if not routes:
        return 0.0, math.inf
    return min(route.latency for route in routes), max(route.rate for route in routes)


def _differences(sums: Floats) -> Floats:
    """Sums over layers i..j, shape (..., N + 1) -> (..., N + 1, N + 1)."""
    between: Floats = sums[..., None, :] - sums[..., :, None]
    return between
