"""PipeDream's planner: a hierarchical dynamic programme for the fastest slowest stage.

Source: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP
2019, section 3.1. Levels k = 1..L from the inside out (devices of a machine, then machines); a
component of level k is one level k - 1 with all of its m_{k-1} components. For the layers i..j:

    A^0(i..j)     = sum of the layers' forward and backward
    T^k(i..j, m)  = 1/m max( A^{k-1}(i..j, m_{k-1}),  2 (m-1) W(i..j) / B_k )      one stage, replicated
    A^k(i..j, m)  = min( T^k(i..j, m),
                         min_{s, m'} max( A^k(i..s, m-m'),  2 a_s / B_k,  T^k(s+1..j, m') ) )

with the parameters' bytes W, the activations' bytes a_s over the cut behind layer s, and the
bandwidth B_k. The activation term is on (the released optimizer has it as an option). A level has
one bandwidth in PipeDream; ours may have two, and each term takes its own: AllReduce for weights,
a single flow for activations. 2 a_s are activations and gradients; what has no gradient counts once.

A minibatch of PipeDream is a micro-batch here. PipeDream runs without a flush and reduces every
minibatch's gradients; here its plan is run in synchronous steps, under our referee. Machines of
different sizes are no hierarchy: then all devices form one level with the links between machines.
Where layers and devices are many, only so many cuts are looked at, so that the programme ends;
inputs of the model are no layers (`layer_costs`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dapple.cluster import Cluster, Link
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.planner.published import LayerCosts, layer_costs
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats

_WORK = 40_000_000
"""Comparisons that one level's programme may take."""
_MARKS = 96


class Level(NamedTuple):
    """A level of the hierarchy.

    Attributes:
        components: m_k, those of the level below in one of this level.
        flow_rate: bytes per second of a transfer between two of them.
        reduce_rate: bytes per second of an AllReduce among them, each way.
    """

    components: int
    flow_rate: float
    reduce_rate: float


class Stage(NamedTuple):
    """A stage of a plan: a range of places, and the devices of its replicas."""

    start: int
    stop: int
    devices: tuple[int, ...]


def pipedream(problem: Problem, micro_batches: int) -> Iterator[Layout]:
    """PipeDream's plan for a minibatch as large as a micro-batch."""
    levels = find_levels(problem.cluster)
    costs = layer_costs(problem, micro_batches, most_places(levels))
    _, stages = plan_hierarchy(costs, levels)
    bounds = tuple(int(costs.places[stage.start]) for stage in stages)
    devices = tuple(stage.devices for stage in stages)
    yield Layout((*bounds, problem.num_layers), devices, micro_batches)


def find_levels(cluster: Cluster) -> tuple[Level, ...]:
    """The cluster's levels from the inside out; levels of one component are left out."""
    sizes = set(cluster.machine_sizes())
    inside = [group.inside for group in cluster.machines]
    outside = [group.outside for group in cluster.machines if group.outside is not None]
    if len(sizes) > 1:
        return (_level(cluster.num_devices, outside),)
    levels = [(sizes.pop(), inside), (cluster.num_machines, outside)]
    return tuple(_level(n, links) for n, links in levels if n > 1) or (_level(1, inside),)


def most_places(levels: Sequence[Level]) -> int:
    """So many cuts that no level takes more than the work allowed."""
    *inner, last = (level.components for level in levels)
    most = (_WORK * 2 / last**2) ** (1 / 2)
    most = min([most, *((_WORK * 2 / count**2) ** (1 / 3) for count in inner)])
    return max(2, min(_MARKS, int(most)))


def plan_hierarchy(costs: LayerCosts, levels: Sequence[Level]) -> tuple[float, tuple[Stage, ...]]:
    """The plan with the fastest slowest stage that uses every device.

    Args:
        costs: the model.
        levels: from the inside out; devices are numbered innermost first.

    Returns:
        A^L(0..n, m_L) in seconds, and the stages.
    """
    places = len(costs.seconds) - 1
    component = costs.seconds[None, :] - costs.seconds[:, None]
    component = np.where(np.tri(places + 1, dtype=np.bool_), np.inf, component)
    weights = costs.parameter_bytes[None, :] - costs.parameter_bytes[:, None]
    moved = costs.activation_bytes + costs.gradient_bytes
    solved: list[_Solution] = []
    for number, level in enumerate(levels):
        rows = places + 1 if number + 1 < len(levels) else 1
        solved.append(_solve(level, component, weights, moved, rows))
        component = solved[-1].seconds
    stages = _unfold(solved, 0, places, range(1))
    return float(solved[-1].seconds[0, places]), tuple(stages)


@dataclass(frozen=True)
class _Solution:
    """One level, solved. R = n + 1 rows i, or the first only, for the outermost level.

    Attributes:
        count: m_k.
        seconds: A^k(i..j, m_k), shape (R, n + 1); infinite where j <= i.
        splits: per m the place s + 1 where the last stage begins, or -1 for one stage.
        replicas: per m the components m' of the last stage.
    """

    count: int
    seconds: Floats
    splits: tuple[Ints, ...]
    replicas: tuple[Ints, ...]

    def stages(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The stages (start, stop, components) of layers start..stop on all components."""
        left, found = self.count, []
        while True:
            split = int(self.splits[left - 1][start, stop])
            used = int(self.replicas[left - 1][start, stop])
            found.append((start if split < 0 else split, stop, used))
            if split < 0:
                return found[::-1]
            left, stop = left - used, split


def _solve(
    level: Level, component: Floats, weights: Floats, crossing: Floats, rows: int
) -> _Solution:
    # replicated[m - 1] is T^k(., m), best[m - 1] is A^k(., m).
    counts = np.arange(1, level.components + 1)[:, None, None]
    reduce = 2 * (counts - 1) * weights / level.reduce_rate
    replicated = np.maximum(component, reduce) / counts
    transfer = crossing / level.flow_rate
    best: list[Floats] = []
    splits: list[Ints] = []
    replicas: list[Ints] = []
    for m in range(1, level.components + 1):
        least = replicated[m - 1, :rows]
        split, used = np.full(least.shape, -1), np.full(least.shape, m)
        if m > 1:
            # Axes: m', row i, place s + 1, column j.
            before = np.maximum(np.stack(best[::-1]), transfer)
            worst = _least_worst(before, replicated[: m - 1])
            better = worst.seconds < least
            least = np.where(better, worst.seconds, least)
            split = np.where(better, worst.split, split)
            used = np.where(better, worst.used, used)
        best.append(least)
        splits.append(split)
        replicas.append(used)
    return _Solution(level.components, best[-1], tuple(splits), tuple(replicas))


class _Worst(NamedTuple):
    seconds: Floats
    split: Ints
    used: Ints


def _least_worst(before: Floats, last: Floats) -> _Worst:
    """Min over m', s of max(before[m', i, s], last[m', s, j]), and where it lies."""
    ways, rows, places = before.shape
    seconds = np.full((rows, places), np.inf)
    split, used = np.full(seconds.shape, -1), np.zeros(seconds.shape, dtype=np.int64)
    for row in range(rows):
        worst = np.maximum(before[:, row, :, None], last).reshape(ways * places, places)
        where = worst.argmin(axis=0)
        seconds[row] = np.take_along_axis(worst, where[None], axis=0)[0]
        split[row], used[row] = where % places, where // places + 1
    return _Worst(seconds, split, used)


def _unfold(
    solved: Sequence[_Solution], start: int, stop: int, components: Sequence[int]
) -> Iterator[Stage]:
    """Stages of a range that `components` of the level above replicate, down to devices."""
    if not solved:
        yield Stage(start, stop, tuple(sorted(components)))
        return
    level, first = solved[-1], 0
    for begin, end, used in level.stages(start, stop):
        inner = [
            outer * level.count + offset
            for outer, offset in itertools.product(components, range(first, first + used))
        ]
        yield from _unfold(solved[:-1], begin, end, inner)
        first += used


def _level(count: int, links: Sequence[Link]) -> Level:
    return Level(
        count,
        min(min(link.bandwidth, link.flow_bandwidth or link.bandwidth) for link in links),
        min(link.allreduce_bandwidth or link.bandwidth for link in links),
    )
