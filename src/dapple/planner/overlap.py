"""Data parallelism whose AllReduce overlaps the last backward, in closed form.

Frameworks send each layer's gradients as soon as the last micro-batch's backward has passed it
(DDP's buckets; DAPPLE, section 6.1, "DP overlap"). Our simulator and runtime start a stage's
AllReduce after its last backward, so this is no plan but a figure to compare with, and the best
case for data parallelism: a bucket per layer, no cost per bucket, nothing slows the backward down.

    backward        | layer N-1 | layer N-2 | ... | layer 0 |
    AllReduce                   |   N-1   |   N-2   | ...         |  0  |  -> optimizer
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dapple.costs import split_rows
from dapple.planner.problem import Layout, Problem
from dapple.planner.refusal import Refusal
from dapple.planner.traffic import Floats


class Overlapped(NamedTuple):
    """A step of data parallelism.

    Attributes:
        layout: one stage on all devices.
        step_seconds: from the first forward to the last update.
        compute_seconds: the same without AllReduce.
    """

    layout: Layout
    step_seconds: float
    compute_seconds: float


def overlapped_data_parallel(problem: Problem) -> Overlapped | Refusal:
    """The number of micro-batches with the shortest step among those that fit the memory."""
    best: Overlapped | None = None
    refused: Refusal | None = None
    devices = tuple(range(problem.num_devices))
    for count in problem.micro_batch_counts:
        layout = Layout((0, problem.num_layers), (devices,), count)
        stages = problem.fit(layout, "dp-overlap")
        if isinstance(stages, Refusal):
            refused = stages if refused is None or stages.excess < refused.excess else refused
            continue
        found = _step(problem, layout)
        if best is None or found.step_seconds < best.step_seconds:
            best = found
    if best is None:
        assert refused is not None, "there is at least one number of micro-batches"
        return refused
    return best


def _step(problem: Problem, layout: Layout) -> Overlapped:
    ready, optimizer = _gradients_ready(problem, layout)
    table = problem.tables(layout.micro_batches).stage(layout.devices[0])
    end = 0.0
    for when, size in zip(ready[::-1], _gradient_bytes(problem)[::-1], strict=True):
        if size > 0:
            end = max(end, float(when)) + size * table.reduce_per_byte
    compute = float(ready[0])
    reduced = end + table.reduce_fixed if end > 0 and problem.num_devices > 1 else 0.0
    return Overlapped(layout, max(compute, reduced) + optimizer, compute + optimizer)


def _gradients_ready(problem: Problem, layout: Layout) -> tuple[Floats, float]:
    """When each layer's last backward has ended on all replicas, and the slowest update."""
    tables = problem.tables(layout.micro_batches)
    kinds = problem.cluster.kind_of_device()
    splits = [split_rows(n, problem.num_devices) for n in (tables.first_rows, tables.last_rows)]
    shares = set(zip((kind.speed for kind in kinds), *splits, strict=True))
    ready = np.zeros(problem.num_layers)
    for speed, first, last in sorted(shares):
        forward, backward = tables.layer_seconds(last)
        large = sum(float(part[-1]) for part in tables.layer_seconds(first))
        small = float(forward[-1] + backward[-1])
        before = tables.num_first * large + (layout.micro_batches - tables.num_first - 1) * small
        done = before + forward[-1] + backward[-1] - backward[:-1]
        ready = np.maximum(ready, done / speed)
    slowest = min(kind.speed for kind in kinds)
    return ready, float(tables.optimizer_prefix[-1]) / slowest


def _gradient_bytes(problem: Problem) -> list[int]:
    """Per layer; a tied parameter's gradient is complete when its first holder's is."""
    sizes = [layer.parameter_bytes for layer in problem.profile.layers]
    for group in problem.profile.tied:
        for layer in sorted({member.layer for member in group.members})[1:]:
            sizes[layer] -= group.parameter_bytes
    return sizes
