"""A lower bound on the step of every plan: no cuts, replicas, devices or M can be faster.

For a step of T seconds every stage s must satisfy (all times of its first replica, which has the
most rows; its work W_s lies between the first micro-batch's way to it and the last one's back)

    A_0 + sum_{a<s} (F_a + B_a) + W_s <= T        and        sum_{a<s} F_a + W_s + A_s <= T

A dynamic programme over (layers, devices, replicas of the last stage) keeps the least of both
prefixes, each on its own, and so finds out whether T can be met at all. The largest T that can't
is the bound. What is relaxed: contention, warm-up, placement (every link is the best one of the
cluster, every device the fastest and largest), and the tied parameters' AllReduce.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dapple.cluster import Link
from dapple.costs import split_rows
from dapple.planner.problem import Problem
from dapple.planner.tables import CostTables, Ints
from dapple.planner.traffic import Floats, MessageBytes, certain_bytes

_CLOSE = 1.005
"""The bound is found up to this factor."""
_NARROW = 1.15
"""Ranges of M that are narrower than this are not split."""
_GROUPS = 40
"""Ranges of M that are looked at before their bounds are taken as they are."""
_OPTIONS = 24
"""Most replica counts that are told apart for a range of M."""
_SLACK = 1e-9


@dataclass(frozen=True)
class Relaxed:
    """Costs that no plan with these numbers of micro-batches undercuts. R replica counts.

    Attributes:
        widths: shape (R,), replica counts; others are no faster than one of these.
        both: shape (R, N + 1, N + 1): F + B of layers i..j.
        forward: shape (R, N + 1, N + 1): F.
        work: shape (R, N + 1, N + 1): W; infinite where they can't fit.
        after: shape (R, N + 1, N + 1): AllReduce and optimizer.
        work_after: work + after.
        link_both, link_forward, link_work: shape (R, R, N + 1): transfers between stages of these
            replica counts over each cut, F + B, F and W.
        linked: shape (N + 1,): whether the stages at the cut wait for each other.
        devices: G.
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


def lower_bound(problem: Problem, step_seconds: float, micro_batches: int) -> float:
    """Seconds below which no plan's step can lie.

    Args:
        problem: profile, cluster and batch; with a given micro-batch size M is given too.
        step_seconds: the step of some plan; the search for the bound starts here.
        micro_batches: M of that plan, where the bound is probably decided.
    """
    bound = _largest_unmet(relax(problem, micro_batches, micro_batches), step_seconds)
    if problem.micro_batch_size is not None:
        return bound
    groups = _groups(problem.global_batch_size)
    for looked_at in range(problem.global_batch_size + len(groups)):
        if not groups:
            break
        low, high = groups.pop()
        relaxed = relax(problem, low, high)
        if not meets(relaxed, bound):
            continue
        if high <= low * _NARROW or looked_at >= _GROUPS:
            bound = _largest_unmet(relaxed, bound)
        else:
            middle = (low + high) // 2
            groups += [(middle + 1, high), (low, middle)]
    return bound


def _groups(batch: int) -> list[tuple[int, int]]:
    """Ranges of M that together are 1..batch."""
    ends = sorted({*range(1, min(batch, 4) + 1), *(2**k for k in range(batch.bit_length())), batch})
    return [(before + 1, end) for before, end in itertools.pairwise([0, *ends])]


def _largest_unmet(relaxed: Relaxed, high: float) -> float:
    """The largest T, up to a factor, that the relaxed costs do not allow; at most `high`."""
    if not meets(relaxed, high):
        return high
    low, step = high, 0.9
    while high > 0:
        low, step = high * step, step * step
        if not meets(relaxed, low):
            break
        high = low
        if step < 1e-9:
            return 0.0
    while high > low * _CLOSE:
        middle = (low + high) / 2
        low, high = (low, middle) if meets(relaxed, middle) else (middle, high)
    return low


def relax(problem: Problem, low: int, high: int) -> Relaxed:
    """Relaxed costs for all M from `low` to `high`."""
    rows = _Rows.of(problem.global_batch_size, low, high)
    least, most = _width_ranges(problem.num_devices, rows)
    speed = max(kind.speed for kind in problem.cluster.kind_of_device())
    memory = max(kind.memory for kind in problem.cluster.kind_of_device())
    tables = problem.tables(high)
    shape = len(least), problem.num_layers + 1, problem.num_layers + 1
    both, forward, work = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    empty = np.tri(shape[1], dtype=np.bool_)
    for option, width in enumerate(map(int, most)):
        there, back, whole = _replica_seconds(tables, rows, width)
        forward[option] = _differences(there) / speed
        both[option] = _differences(there + back) / speed
        work[option] = _differences(whole) / speed
        needed = _least_bytes(problem, tables, -(-rows.first // width))
        work[option][empty | (needed > memory)] = np.inf
    after = _after(problem, tables, least, speed)
    link_both, link_forward, link_work = _links(problem, rows, most)
    return Relaxed(
        widths=least,
        both=both,
        forward=forward,
        work=work,
        work_after=work + after,
        after=after,
        link_both=link_both,
        link_forward=link_forward,
        link_work=link_work,
        linked=tables.linked,
        devices=problem.num_devices,
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
    for e in range(1, relaxed.devices + 1):
        now = np.flatnonzero(relaxed.widths <= e)
        starts = e - relaxed.widths[now]
        base, base_f = _entered(relaxed, prefix[starts], prefix_f[starts], now, limit)
        late = ~(base_f[:, :, None] + relaxed.work_after[now] <= limit)
        late |= ~(base[:, :, None] + relaxed.work[now] <= limit)
        for entered, own, first, reached in (
            (base, relaxed.both, alone, prefix),
            (base_f, relaxed.forward, alone_f, prefix_f),
        ):
            sums = entered[:, :, None] + own[now]
            sums[late] = np.inf
            reached[e, now] = np.minimum(sums.min(axis=1), first[now])
    return bool(prefix[:, :, -1].min() <= limit)


def _entered(
    relaxed: Relaxed, prefix: Floats, prefix_f: Floats, now: Ints, limit: float
) -> tuple[Floats, Floats]:
    """The least prefixes when a stage begins, its transfer included; shape (now, cuts).

    Args:
        relaxed: the costs.
        prefix, prefix_f: shape (now, options before, cuts), of A_0 + F + B and of F.
        now: options of the stage that begins.
        limit: what no transfer may exceed with its prefix.
    """
    both, forward, work = (
        link[:, now].swapaxes(0, 1)
        for link in (relaxed.link_both, relaxed.link_forward, relaxed.link_work)
    )
    waits = np.where(prefix + work <= limit, prefix + both, np.inf)
    # Stages that do not wait for each other start afresh.
    apart = np.where(np.isfinite(prefix), 0.0, np.inf)
    entered = np.where(relaxed.linked, waits, apart)
    entered_f = np.where(relaxed.linked, prefix_f + forward, apart)
    return entered.min(axis=1), np.where(np.isfinite(entered), entered_f, np.inf).min(axis=1)


@dataclass(frozen=True)
class _Rows:
    """Rows that every M of a range has at least or at most.

    Attributes:
        counts: lowest and highest M.
        batch: rows of the step.
        first, last: least rows of the first and the last micro-batch.
        most: most rows of any micro-batch.
    """

    counts: tuple[int, int]
    batch: int
    first: int
    last: int
    most: int

    @classmethod
    def of(cls, batch: int, low: int, high: int) -> _Rows:
        return cls((low, high), batch, -(-batch // high), batch // high, -(-batch // low))

    @property
    def single(self) -> bool:
        return self.counts[0] == self.counts[1]


def _width_ranges(devices: int, rows: _Rows) -> tuple[Ints, Ints]:
    """Replica counts in groups: the least of each is paid for, the most of each works.

    For one M a group has the same rows on its fullest replica, so the least count is as good as
    any other of it.
    """
    if rows.single:
        least: dict[int, int] = {}
        for width in range(1, devices + 1):
            least.setdefault(-(-rows.first // width), width)
        single = np.array(sorted(least.values()))
        return single, single
    count = min(devices, _OPTIONS)
    starts = np.unique(np.geomspace(1, devices, count).round().astype(int))
    return starts, np.array([*(starts[1:] - 1), devices])


def _replica_seconds(tables: CostTables, rows: _Rows, width: int) -> tuple[Floats, Floats, Floats]:
    """Prefix sums for the first replica: F and B of a micro-batch, and the whole step's work."""
    least_first, least_last = -(-rows.first // width), -(-rows.last // width)
    if rows.single:
        there, back = tables.layer_seconds(least_first)
        there_last, back_last = tables.layer_seconds(least_last)
        num_last = tables.micro_batches - tables.num_first
        whole = tables.num_first * (there + back) + num_last * (there_last + back_last)
        return there, back_last, whole
    # Neither the time nor the time per row has a minimum between two sizes of the profile.
    most = -(-rows.most // width)
    sizes = {n for n in tables.profile.batch_sizes if least_last < n < most}
    points = sorted({least_last, least_first, most} | sizes)
    seconds = {n: _layer_seconds(tables, n) for n in points}
    there = np.minimum.reduce([seconds[n][0] for n in points if n >= least_first])
    back = np.minimum.reduce([seconds[n][1] for n in points])
    per_row = np.minimum.reduce([(seconds[n][0] + seconds[n][1]) / n for n in points])
    return _prefix(there), _prefix(back), _prefix(per_row * (rows.batch / width))


def _layer_seconds(tables: CostTables, rows: int) -> tuple[Floats, Floats]:
    there, back = tables.layer_seconds(rows)
    return np.diff(there), np.diff(back)


def _least_bytes(problem: Problem, tables: CostTables, rows: int) -> Floats:
    """Parameters, gradients, optimizer state and one saved micro-batch; shape (N + 1, N + 1)."""
    if not problem.memory_is_known:
        return np.zeros((problem.num_layers + 1, problem.num_layers + 1))
    factor = 2 + problem.optimizer_state_factor
    tied = sum(group.parameter_bytes * (len(group.members) - 1) for group in problem.profile.tied)
    parameters = np.maximum(_differences(tables.parameter_prefix) - tied, 0.0)
    return factor * parameters + _differences(tables.saved_prefix(rows))


def _after(problem: Problem, tables: CostTables, widths: Ints, speed: float) -> Floats:
    """AllReduce and optimizer, shape (R, N + 1, N + 1)."""
    layers = np.arange(problem.num_layers + 1)
    own = np.maximum(tables.own_parameter_bytes(layers[:, None], layers[None, :]), 0.0)
    update = np.maximum(_differences(tables.optimizer_prefix), 0.0) / speed
    costs = []
    for width in map(int, widths):
        rings = [fixed + rate * own for fixed, rate in _least_rings(problem, width)]
        costs.append(np.where(own > 0, np.minimum.reduce(rings), 0.0) + update)
    return np.array(costs)


def _least_rings(problem: Problem, replicas: int) -> list[tuple[float, float]]:
    """Fixed seconds and seconds per byte of the rings that may be the fastest."""
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
    return rings


def _ring_rate(link: Link, paper: bool) -> float:
    rate = link.allreduce_bandwidth or link.bandwidth
    return rate if paper else min(rate, link.bandwidth)


def _links(problem: Problem, rows: _Rows, widths: Ints) -> tuple[Floats, Floats, Floats]:
    """Least seconds of the message between the first replicas of two stages: F + B, F, work."""
    latency, rate = _best_route(problem)
    certain = certain_bytes(problem.profile)

    def seconds(per_replica: Floats, size: MessageBytes, messages: int = 1) -> Floats:
        sent = per_replica[:, :, None] * size.per_row + messages * size.fixed
        result: Floats = np.where(sent > 0, messages * latency + sent / rate, 0.0)
        return result

    def fewest(total: int) -> Floats:
        most = -(-total // widths).astype(np.float64)
        return np.minimum(most[:, None], most[None, :])

    shares = np.minimum(rows.batch / widths[:, None], rows.batch / widths[None, :])
    forward = seconds(fewest(rows.first), certain.forward)
    both = forward + seconds(fewest(rows.last), certain.backward)
    whole = [seconds(shares, size, rows.counts[0]) for size in (certain.forward, certain.backward)]
    if problem.model.network.model != "paper" and problem.cluster.num_machines > 1:
        crowded = _crowding(problem, rows, widths)[:, :, None]
        whole += [crowded * certain.forward.per_row, crowded * certain.backward.per_row]
    return both, forward, np.maximum.reduce(whole)


def _crowding(problem: Problem, rows: _Rows, widths: Ints) -> Floats:
    """Rows of the whole step that pass one network card, per bandwidth; shape (R, R).

    Where k machines hold the r devices of one stage, they hold at most k m - r of the other's n;
    the others' rows pass the k cards.
    """
    sizes = problem.machine_sizes
    most = max(sizes)
    links = (group.outside for group in problem.cluster.machines)
    bandwidth = max(link.bandwidth for link in links if link is not None)
    crowded = np.zeros((len(widths), len(widths)))
    for (a, few), (b, many) in itertools.product(enumerate(map(int, widths)), repeat=2):
        each = _least_rows(rows, many)
        shares = [
            max(0, many + few - machines * most) * each / machines
            for machines in range(-(-few // most), min(few, len(sizes)) + 1)
        ]
        crowded[a, b] = crowded[b, a] = max(crowded[a, b], min(shares) / bandwidth)
    return crowded


def _least_rows(rows: _Rows, replicas: int) -> int:
    """Rows of a step that every replica has at least."""
    low, high = rows.counts
    if rows.single:
        return sum(size // replicas for size in split_rows(rows.batch, high))
    return low * (rows.batch // high // replicas)


def _best_route(problem: Problem) -> tuple[float, float]:
    """The least latency and the highest rate among all pairs of devices."""
    routes = []
    network = problem.model.network
    first = np.cumsum([0, *problem.machine_sizes])
    for here in range(len(problem.machine_sizes)):
        if problem.machine_sizes[here] > 1:
            routes.append(network.route(int(first[here]), int(first[here]) + 1))
        if here:
            routes.append(network.route(0, int(first[here])))
            routes.append(network.route(int(first[here]), int(first[here - 1])))
    if not routes:
        return 0.0, math.inf
    return min(route.latency for route in routes), max(route.rate for route in routes)


def _prefix(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _differences(prefix: Floats) -> Floats:
    sums: Floats = prefix[None, :] - prefix[:, None]
    return sums
