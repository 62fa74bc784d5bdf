"""Whether a step of T seconds can be met at all, on small clusters: layers x devices x replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dapple.cluster import Link
from dapple.planner.exposed import exposed_seconds
from dapple.planner.fluid import Fluid
from dapple.planner.layers import LayerTables, prefix
from dapple.planner.mixed import units_of
from dapple.planner.problem import Problem
from dapple.planner.shares import Shares
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats, MessageBytes

_SLACK = 1e-9
_ROUNDING = 64
"""Bytes by which the sums here may be above those of a stage that just fits."""


@dataclass(frozen=True)
class Relaxed:
    """Costs that no plan with these numbers of micro-batches undercuts. R replica counts.

    Attributes:
        widths: shape (R,), ascending, units of speed (`dapple.planner.mixed`), devices where all
            are equally fast; others are no faster than one of these.
        ways: shape (R, 2, N + 1), prefix sums: F + B and F.
        device_seconds: shape (N,), what each layer takes of the devices' time.
        work: shape (R, N + 1, N + 1): W of layers i..j, or the round trips that memory makes them
            wait for; infinite where they can't fit.
        after: shape (R, N + 1, N + 1): AllReduce and optimizer.
        link_ways: shape (R, R, 2, N + 1): transfers between stages of these replica counts over
            each cut, F + B and F, whichever of the two sends.
        link_work: shape (R, R, N + 1): W of the same.
        linked: shape (N + 1,): whether the stages at the cut wait for each other.
        fluid: what is needed for the layers behind a cut.
        devices: units of the cluster.
    """

    widths: Ints
    ways: Floats
    device_seconds: Floats
    work: Floats
    after: Floats
    link_ways: Floats
    link_work: Floats
    linked: NDArray[np.bool_]
    fluid: Fluid
    devices: int


def relax(problem: Problem, found: Shares, fluid: Fluid | None = None) -> Relaxed:
    """Relaxed costs for all M of a range of `row_ranges`; `fluid`: of the same, if at hand."""
    speed = max(problem.speeds)
    tables = problem.layer_tables
    both = np.stack([found.forward + found.backward, found.forward], axis=1)
    link_ways, link_work = _links(problem, found)
    return Relaxed(
        widths=found.units,
        ways=prefix(both / speed),
        device_seconds=(found.work / speed * found.units[:, None]).min(axis=0),
        work=_work(problem, found, speed),
        after=_after(problem, tables, found, speed),
        link_ways=link_ways,
        link_work=link_work,
        linked=tables.linked,
        fluid=fluid or Fluid.of(found, speed, bool(tables.linked[1:-1].all())),
        devices=units_of(problem).total,
    )


def meets(relaxed: Relaxed, target: float) -> bool:
    """Whether the relaxed costs allow a step of `target` seconds."""
    options, _, layers = relaxed.ways.shape
    limit = target * (1 + _SLACK)
    # Of layers before each cut on so many devices, by the last stage's replicas: the least of
    # A_0 + F + B and of F of all stages.
    before = np.full((relaxed.devices + 1, options, 2, layers), np.inf)
    # The first stage begins at layer 0, and its AllReduce ends the step.
    alone = relaxed.ways.copy()
    alone[:, 0] += relaxed.after[:, 0]
    late = relaxed.work[:, 0] + relaxed.after[:, 0] > limit
    np.copyto(alone, np.inf, where=late[:, None])
    first, last = _band(relaxed, limit)
    counts, widths = np.arange(relaxed.devices + 1), relaxed.widths.tolist()
    behind_of, fit_of = (
        np.searchsorted(relaxed.widths, counts, side=side).tolist() for side in ("left", "right")
    )
    for e in range(1, relaxed.devices + 1):
        here, behind, fit = before[e], behind_of[e], fit_of[e]
        here[:fit] = alone[:fit]
        if behind and first[e] <= last[e]:
            # The last stages of these options begin behind e - width devices, and bands ascend.
            some = slice(first[e - widths[behind - 1]], last[e - widths[0]] + 1)
            ends = slice(first[e], last[e] + 1)
            if some.start < some.stop:
                starts = e - relaxed.widths[:behind]
                entered = _entered(relaxed, before[starts, :, :, some], some, limit)
                option, begin = np.nonzero(np.isfinite(entered[:, 0]))
                if len(option):
                    found = entered[option, :, begin], option, begin + some.start
                    _add(relaxed, here, found, ends, limit)
        if last[e] == layers - 1 and here[:, 0, -1].min() <= limit:
            return True
    return False


def _add(
    relaxed: Relaxed, here: Floats, stages: tuple[Floats, Ints, Ints], ends: slice, limit: float
) -> None:
    """Put the best of some stages behind each of the cuts where they may end.

    Args:
        relaxed: the costs.
        here: shape (R, 2, N + 1), what is known of as many devices.
        stages: shapes (P, 2), (P,), (P,): the least sums when it begins, which option, ascending,
            and the layer where it begins.
        ends: cuts.
        limit: what no stage may exceed.
    """
    entered, option, begin = stages
    busy, ways = relaxed.work[option, begin, ends], relaxed.ways[option]
    late = entered[:, 0, None] + busy > limit
    busy += relaxed.after[option, begin, ends]
    late |= entered[:, 1, None] + busy > limit
    begins = np.concatenate([[0], np.flatnonzero(option[1:] != option[:-1]) + 1])
    before = ways[np.arange(len(option)), :, begin]
    both = (entered - before)[:, :, None] + ways[:, :, ends]
    np.copyto(both, np.inf, where=late[:, None])
    reached = np.minimum.reduceat(both, begins, axis=0)
    options = option[begins]
    here[options, :, ends] = np.minimum(here[options, :, ends], reached)


def _band(relaxed: Relaxed, limit: float) -> tuple[list[int], list[int]]:
    """First and last cut, for each number of devices, that they can and must have come to.

    No device works for longer than the limit, and layers take some device-seconds at least.
    """
    done = prefix(relaxed.device_seconds)
    devices = np.arange(relaxed.devices + 1)
    last = np.searchsorted(done, limit * devices * (1 + _SLACK), side="right") - 1
    needed = relaxed.fluid.needed(limit, np.zeros(1))[0]
    first = np.searchsorted(-needed, devices - relaxed.devices)
    return first.tolist(), last.tolist()


def _entered(relaxed: Relaxed, before: Floats, cuts: slice, limit: float) -> Floats:
    """The least sums when a stage begins, its transfer included; shape (options, 2, cuts).

    Args:
        relaxed: the costs.
        before: shape (options, options before, 2, cuts), the sums without it, by the options of
            the stage that begins, the first ones.
        cuts: where it may begin.
        limit: what no transfer may exceed with the sum before it.
    """
    options = len(before)
    entered: Floats = before + relaxed.link_ways[:options, :, :, cuts]
    late = before[:, :, 0] + relaxed.link_work[:options, :, cuts] > limit
    np.copyto(entered, np.inf, where=late[:, :, None])
    if not relaxed.fluid.linked:
        # Stages that do not wait for each other start afresh.
        afresh = np.where(np.isfinite(before), 0.0, np.inf)
        np.copyto(entered, afresh, where=~relaxed.linked[cuts])
    least: Floats = entered.min(axis=1)
    return least


def _work(problem: Problem, found: Shares, speed: float) -> Floats:
    """W of layers i..j, infinite where they are none or can't fit; shape (R, N + 1, N + 1)."""
    work = _differences(prefix(found.work / speed))
    work[:, np.tri(problem.num_layers + 1, dtype=np.bool_)] = np.inf
    if problem.memory_is_known:
        # In place as far as possible: making large arrays takes longer than filling them.
        room, saved = (_differences(sums) for sums in held_bytes(problem, found))
        np.subtract(memory_for(problem) + _ROUNDING, room, out=room)
        room /= np.maximum(saved, 1e-6, out=saved)
        np.floor(room, out=room)
        too_full = room < least_in_flight(problem, found)
        if caps_in_flight(problem):
            back = to_the_end(found.trip.min(axis=0) / speed, problem.layer_tables.linked)
            trips = _differences(prefix(found.trip / speed))
            trips += back
            rounds = np.divide(found.low, np.clip(room, 1, found.low, out=room), out=room)
            trips *= np.ceil(rounds, out=rounds)
            np.maximum(work, trips, out=work)
        work[too_full] = np.inf
    return work


def held_bytes(problem: Problem, found: Shares) -> tuple[Floats, Floats]:
    """Prefix sums of what a stage holds, and for each micro-batch in flight; shape (R, N + 1)."""
    tables = problem.layer_tables
    factors = [2 + problem.state_factor(int(most), problem.shard) for most in found.most_widths]
    saved = np.array([tables.saved_prefix(int(rows)) for rows in found.held_rows])
    return np.outer(factors, tables.parameter_prefix), saved


def memory_for(problem: Problem) -> float:
    """Bytes for what `held_bytes` says, in which a tied parameter may be counted twice."""
    twice = sum(g.parameter_bytes * (len(g.members) - 1) for g in problem.profile.tied)
    return float(problem.most_memory) + (2 + problem.optimizer_state_factor) * twice


def caps_in_flight(problem: Problem) -> bool:
    """Whether memory limits how many micro-batches are in flight.

    With K of them there are at least ceil(M / K) round trips from the stage to the last one.
    """
    return problem.memory_is_known and not problem.recompute


def least_in_flight(problem: Problem, found: Shares) -> int:
    """Micro-batches whose activations a stage must hold; recomputing, all but one of their inputs."""
    return found.low if problem.schedule == "gpipe" and not problem.recompute else 1


def to_the_end(quickest: Floats, linked: NDArray[np.bool_]) -> Floats:
    """The quickest way from each cut through all layers behind that wait for each other."""
    way = np.zeros(len(quickest) + 1)
    for layer in reversed(range(len(quickest))):
        way[layer] = quickest[layer] + way[layer + 1]
        if layer and not linked[layer]:
            way[layer] = 0.0
    return way


def _after(problem: Problem, tables: LayerTables, found: Shares, speed: float) -> Floats:
    """AllReduce behind the last backward, and optimizer, shape (R, N + 1, N + 1)."""
    layers = np.arange(problem.num_layers + 1)
    own = np.maximum(tables.own_parameter_bytes(layers[:, None], layers[None, :]), 0.0)
    update = np.maximum(_differences(tables.optimizer_prefix), 0.0) / speed
    rings = [least_rings(problem, int(width)) for width in found.widths]
    numbers = np.repeat(np.arange(len(rings)), [len(options) for options in rings])
    fixed, rate = np.array([ring for options in rings for ring in options]).T
    last = prefix(found.last_backward / speed)[numbers]
    exposed = exposed_seconds(tables.untied_prefix, last, fixed, rate)
    whole = fixed[:, None, None] * tables.fewest_buckets(own)
    whole += rate[:, None, None] * own
    whole -= _differences(last)
    np.maximum(exposed, whole, out=exposed, where=own > 0)
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


def _links(problem: Problem, found: Shares) -> tuple[Floats, Floats]:
    """Least seconds of the message between the first replicas of two stages: F + B and F, work.

    The same whichever of the two sends.
    """
    latency, rate = problem.model.network.best_route
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
    return np.stack([forward + backward, forward], axis=2), np.maximum.reduce(whole)


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


def _differences(sums: Floats) -> Floats:
    """Sums over layers i..j, shape (..., N + 1) -> (..., N + 1, N + 1)."""
    between: Floats = sums[..., None, :] - sums[..., :, None]
    return between
