"""Exhaustive search: every layout in reach, in the order of its lower bound.

The simulator decides, and a layout is simulated only while its bound says that it could still
win, so the search looks at few of them and loses none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dapple.planner.bounds import layout_bounds
from dapple.planner.frame import card_rates, device_orders
from dapple.planner.layout import Layout
from dapple.planner.placement import placements
from dapple.planner.problem import Problem
from dapple.planner.tables import Ints
from dapple.planner.traffic import Devices, Floats


@dataclass(frozen=True)
class Family:
    """Layouts that differ in their cuts only.

    Attributes:
        devices: devices of each stage.
        micro_batches: M.
        bounds: shape (P, S + 1), the layer numbers of the cuts.
        least: shape (P,), the step's lower bound, seconds.
    """

    devices: tuple[Devices, ...]
    micro_batches: int
    bounds: Ints
    least: Floats

    def layout(self, row: int) -> Layout:
        """The layout in a row."""
        return Layout(tuple(map(int, self.bounds[row])), self.devices, self.micro_batches)


def families(problem: Problem, limit: int) -> list[Family] | None:
    """All layouts; None: there are more than `limit`."""
    # Each choice of cuts and of every stage's number of devices, sum_s C(N-1, s-1) C(G, s) of them
    # (Vandermonde), has at least one placement.
    choices = math.comb(problem.num_layers + problem.num_devices - 1, problem.num_layers)
    if choices * len(problem.micro_batch_counts) > limit:
        return None
    found: list[Family] = []
    total = 0
    most = min(problem.num_layers, problem.num_devices)
    for stages in range(1, most + 1):
        cuts = math.comb(problem.num_layers - 1, stages - 1)
        per_devices = cuts * len(problem.micro_batch_counts)
        room = (limit - total) // per_devices
        devices = list(itertools.islice(_in_all_orders(problem, stages), room + 1))
        if len(devices) > room:
            return None
        total += per_devices * len(devices)
        bounds = all_bounds(problem.num_layers, stages)
        for count, sets in itertools.product(problem.micro_batch_counts, devices):
            least = layout_bounds(problem.tables(count), bounds, sets, problem.shard)
            found.append(Family(sets, count, bounds, least))
    return found


def all_bounds(layers: int, stages: int) -> Ints:
    """Every way to cut the layers into non-empty stages, shape (P, stages + 1), in order."""
    cuts = np.array(list(itertools.combinations(range(1, layers), stages - 1)), dtype=np.int64)
    cuts = cuts.reshape(math.comb(layers - 1, stages - 1), stages - 1)
    return np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, layers)))


def _in_all_orders(problem: Problem, stages: int) -> Iterator[tuple[Devices, ...]]:
    """`device_sequences` with the machines as they are, the best first, and the best last.

    The policies begin with the first machine, which may be the slowest, the one with least memory, or
    the one with the slowest network card.
    """
    machine = problem.cluster.machine_of_device()
    orders = [
        tuple(dict.fromkeys(machine[d] for d in order)) for order in device_orders(problem.cluster)
    ]
    rates = card_rates(problem.cluster)
    for sign in (-1, 1):
        orders.append(tuple(sorted(range(len(rates)), key=lambda m: (sign * rates[m], m))))
    found: set[tuple[Devices, ...]] = set()
    for order in dict.fromkeys(orders):
        devices = [d for m in order for d in range(len(machine)) if machine[d] == m]
        sizes = [problem.machine_sizes[m] for m in order]
        for sequence in device_sequences(sizes, stages):
            sets = tuple(tuple(sorted(devices[d] for d in part)) for part in sequence)
            if sets not in found:
                found.add(sets)
                yield sets


def device_sequences(
    machine_sizes: Sequence[int], stages: int, taken: tuple[Devices, ...] = ()
) -> Iterator[tuple[Devices, ...]]:
    """Device sets for each stage in turn, by every placement policy, without repetition."""
    if stages == 0:
        yield taken
        return
    used = [device for devices in taken for device in devices]
    free = sum(machine_sizes) - len(used)
    for count in range(1, free - (stages - 1) + 1):
        for devices in placements(machine_sizes, used, count):
            yield from device_sequences(machine_sizes, stages - 1, (*taken, devices))


def in_order(found: Sequence[Family]) -> Iterator[tuple[float, Layout]]:
    """All layouts with their lower bound, ascending; of equal ones, fewer stages first."""
    if not found:
        return
    least = np.concatenate([family.least for family in found])
    first = np.cumsum([0] + [len(family.least) for family in found])
    for position in np.argsort(least, kind="stable"):
        family = int(np.searchsorted(first, position, side="right")) - 1
        yield float(least[position]), found[family].layout(int(position - first[family]))
