"""Small changes of a layout, for the local search that ends the planning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dapple.planner.balance import balanced_bounds
from dapple.planner.frame import device_orders
from dapple.planner.layout import Layout
from dapple.planner.placement import POLICIES, place
from dapple.planner.problem import Problem
from dapple.planner.traffic import Devices

_STEPS = (1, 2, 4, 8)
"""How far, in layers, a cut is moved."""
_UNROLLED = 16
"""Most single devices that a stage is taken apart into."""
_IDLE = 3
"""Most idle devices to choose from."""
_GIVERS = 4
"""Most stages that may give a device to a new one."""


def neighbours(problem: Problem, layout: Layout, focus: Sequence[int]) -> list[Layout]:
    """Different layouts that differ from this one in one respect, in a fixed order.

    Args:
        problem: what is planned.
        layout: where the search stands.
        focus: stages to change; all of them, or the slowest ones of a long pipeline.
    """
    found: dict[Layout, None] = {}
    found.update(dict.fromkeys(_moved_cuts(layout, focus)))
    for change in (moved_devices, other_lengths):
        found.update(dict.fromkeys(change(problem, layout, focus)))
    found.update(dict.fromkeys(_placed(problem, layout)))
    found.update(dict.fromkeys(other_counts(problem, layout)))
    same = {
        replace(other, policy=layout.policy, recompute=layout.recompute, shard=layout.shard): None
        for other in found
    }
    same.update(dict.fromkeys(problem.variants(layout)))
    same.pop(layout, None)
    return list(same)


def pack(order: Devices, counts: Sequence[int]) -> tuple[Devices, ...]:
    """Neighbouring devices of an order for each stage in turn.

    >>> pack((0, 2, 1, 3), (1, 2))
    ((0,), (1, 2))
    """
    first = 0
    sets = []
    for count in counts:
        sets.append(tuple(sorted(order[first : first + count])))
        first += count
    return tuple(sets)


def shifted_cuts(layout: Layout) -> list[Layout]:
    """The layout with any one of its cuts a layer further to the front or back."""
    moved = _moved_cuts(layout, range(layout.num_stages), (1,))
    return [replace(layout, bounds=other.bounds) for other in moved]


def _moved_cuts(
    layout: Layout, focus: Sequence[int], steps: Sequence[int] = _STEPS
) -> Iterator[Layout]:
    bounds = layout.bounds
    for cut in sorted({c for s in focus for c in (s, s + 1)} - {0, layout.num_stages}):
        for step in steps:
            for layer in (bounds[cut] - step, bounds[cut] + step):
                if bounds[cut - 1] < layer < bounds[cut + 1]:
                    yield _with_bounds(layout, (*bounds[:cut], layer, *bounds[cut + 1 :]))


def moved_devices(problem: Problem, layout: Layout, focus: Sequence[int]) -> Iterator[Layout]:
    """One device more or less in a stage; from another stage, or one that is idle."""
    counts = [len(devices) for devices in layout.devices]
    spare = problem.num_devices - sum(counts)
    order = _order_of(problem, layout)
    for stage in focus:
        for other in range(layout.num_stages):
            if (
                other != stage
                and counts[other] > 1
                and (abs(other - stage) == 1 or len(counts) < 6)
            ):
                yield _with_counts(layout, order, counts, {stage: 1, other: -1})
        if spare:
            yield _with_counts(layout, order, counts, {stage: 1})
        if counts[stage] > 1:
            yield _with_counts(layout, order, counts, {stage: -1})


def exchanged_devices(problem: Problem, layout: Layout) -> Iterator[Layout]:
    """A device from any stage to any other, and two stages with each other's number of replicas."""
    counts = [len(devices) for devices in layout.devices]
    order = _order_of(problem, layout)
    for one, other in itertools.permutations(range(layout.num_stages), 2):
        if counts[other] > 1:
            yield _with_counts(layout, order, counts, {one: 1, other: -1})
        more = counts[other] - counts[one]
        if one < other and more:
            yield _with_counts(layout, order, counts, {one: more, other: -more})


def other_lengths(problem: Problem, layout: Layout, focus: Sequence[int]) -> Iterator[Layout]:
    """More or fewer stages."""
    for change in (_merged, _split, _unrolled):
        yield from change(problem, layout, focus)


def _merged(problem: Problem, layout: Layout, focus: Sequence[int]) -> Iterator[Layout]:
    """One stage in place of two, on the devices of both, of the first, or of the second."""
    devices = layout.devices
    for stage in focus:
        if stage + 1 == layout.num_stages:
            continue
        bounds = layout.bounds[: stage + 1] + layout.bounds[stage + 2 :]
        both = tuple(sorted(devices[stage] + devices[stage + 1]))
        for kept in (both, devices[stage], devices[stage + 1]):
            sets = (*devices[:stage], kept, *devices[stage + 2 :])
            yield Layout(bounds, sets, layout.micro_batches)


def _split(problem: Problem, layout: Layout, focus: Sequence[int]) -> Iterator[Layout]:
    """Two stages in place of one, on its devices and perhaps one that is idle or from elsewhere."""
    order = _order_of(problem, layout)
    counts = [len(devices) for devices in layout.devices]
    idle = problem.num_devices - sum(counts)
    for stage in focus:
        start, stop = layout.bounds[stage : stage + 2]
        if stop - start < 2:
            continue
        others = [s for s in range(len(counts)) if s != stage and counts[s] > 1]
        givers: list[int | None] = [*([-1] if idle else []), *others[:_GIVERS]]
        if counts[stage] > 1:
            givers.append(None)
        for giver in givers:
            have = counts[stage] + (giver is not None)
            rest = [count - (s == giver) for s, count in enumerate(counts)]
            for first in sorted({1, have // 2, have - 1}):
                cut = _share(problem, layout.micro_batches, start, stop, first / have)
                parts = [*rest[:stage], first, have - first, *rest[stage + 1 :]]
                bounds = (*layout.bounds[: stage + 1], cut, *layout.bounds[stage + 1 :])
                yield Layout(bounds, pack(order, parts), layout.micro_batches)


def _unrolled(problem: Problem, layout: Layout, focus: Sequence[int]) -> Iterator[Layout]:
    """A pipeline of single devices in place of a stage's replicas."""
    forward, backward = problem.layer_tables.layer_seconds(1)
    costs = np.diff(forward + backward)
    for stage in focus:
        devices = layout.devices[stage]
        start, stop = layout.bounds[stage : stage + 2]
        parts = min(len(devices), stop - start)
        if not 2 < parts <= _UNROLLED:
            continue
        cuts = [start + c for c in balanced_bounds(costs[start:stop].tolist(), parts)]
        singles = tuple((device,) for device in devices[:parts])
        yield Layout(
            (*layout.bounds[:stage], *cuts, *layout.bounds[stage + 2 :]),
            (*layout.devices[:stage], *singles, *layout.devices[stage + 1 :]),
            layout.micro_batches,
        )


def _placed(problem: Problem, layout: Layout) -> Iterator[Layout]:
    """The same stages on other devices: by each policy, and in each order."""
    counts = [len(devices) for devices in layout.devices]
    for policy in POLICIES:
        taken: list[int] = []
        sets: list[Devices] = []
        for count in counts:
            devices = place(policy, problem.machine_sizes, taken, count)
            assert devices is not None, "the layout fits into the cluster as it is"
            sets.append(devices)
            taken.extend(devices)
        yield Layout(layout.bounds, tuple(sets), layout.micro_batches)
    for order in device_orders(problem.cluster):
        yield Layout(layout.bounds, pack(order, counts), layout.micro_batches)


def other_counts(problem: Problem, layout: Layout) -> Iterator[Layout]:
    """The next smaller and the next larger M."""
    options = problem.micro_batch_counts
    here = options.index(layout.micro_batches)
    for other in options[max(0, here - 1) : here + 2]:
        yield Layout(layout.bounds, layout.devices, other)


def _share(problem: Problem, micro_batches: int, start: int, stop: int, share: float) -> int:
    """The cut that leaves about `share` of the layers' time before it."""
    tables = problem.tables(micro_batches)
    forward, backward = tables.layers.layer_seconds(tables.first_rows)
    seconds = forward + backward
    wanted = seconds[start] + share * (seconds[stop] - seconds[start])
    return min(range(start + 1, stop), key=lambda layer: abs(float(seconds[layer]) - wanted))


def _order_of(problem: Problem, layout: Layout) -> Devices:
    counts = [len(devices) for devices in layout.devices]
    orders = device_orders(problem.cluster)
    return next((order for order in orders if pack(order, counts) == layout.devices), orders[0])


def idle_choices(problem: Problem, devices: Sequence[Devices], stage: int) -> list[int]:
    """Idle devices that a stage may take: the first of each machine, those of its machines first.

    Args:
        problem: what is planned.
        devices: of all stages.
        stage: the one that looks for a device.
    """
    machine = problem.machine_of_device
    used = {device for members in devices for device in members}
    firsts: dict[int, int] = {}
    for device in range(problem.num_devices):
        if device not in used:
            firsts.setdefault(machine[device], device)
    own = {machine[device] for device in devices[stage]}
    return sorted(firsts.values(), key=lambda d: (machine[d] not in own, d))[:_IDLE]


def _with_bounds(layout: Layout, bounds: tuple[int, ...]) -> Layout:
    return Layout(bounds, layout.devices, layout.micro_batches)


def _with_counts(
    layout: Layout, order: Devices, counts: Sequence[int], change: dict[int, int]
) -> Layout:
    changed = [count + change.get(stage, 0) for stage, count in enumerate(counts)]
    return Layout(layout.bounds, pack(order, changed), layout.micro_batches)
