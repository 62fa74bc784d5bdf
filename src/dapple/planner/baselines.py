"""The planners to compare with: plans that people make by hand, and the published planners.

    dp          one stage on every device; gradients are added up during the last backward
    straight    one device per stage, cut evenly by time: the slowest stage is as fast as possible
    even        one device per stage, cut evenly by the number of layers
    gpipe       the straight pipeline with GPipe's schedule (Huang et al., NeurIPS 2019)
    torchgpipe  torchgpipe's balance by time, with GPipe's schedule
    pipedream   PipeDream's hierarchical dynamic programme
    hpgo        the released search of DAPPLE's authors
    paper       the planner that DAPPLE describes, with its formula as printed
    paper-corrected  the same with the pivot that agrees with its equations

All are judged like our own plans: the simulator decides, micro-batch sizes and warm-up are chosen
for each, and what does not fit the memory is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dapple.planner.balance import balanced_bounds
from dapple.planner.hpgo import hpgo
from dapple.planner.layout import Layout
from dapple.planner.paper import paper, paper_corrected
from dapple.planner.pipedream import pipedream
from dapple.planner.problem import Problem
from dapple.planner.torchgpipe import torchgpipe

Baseline = Callable[[Problem, int], Iterator[Layout]]


def data_parallel(problem: Problem, micro_batches: int) -> Iterator[Layout]:
    """One stage, replicated on every device."""
    devices = tuple(range(problem.num_devices))
    yield Layout((0, problem.num_layers), (devices,), micro_batches)


def straight(problem: Problem, micro_batches: int) -> Iterator[Layout]:
    """One device per stage, as many stages as possible, cut so that the slowest is fastest."""
    stages = min(problem.num_layers, problem.num_devices)
    forward, backward = problem.layer_tables.layer_seconds(problem.tables(micro_batches).first_rows)
    bounds = balanced_bounds(np.diff(forward + backward).tolist(), stages)
    yield Layout(bounds, _one_each(stages), micro_batches)


def even(problem: Problem, micro_batches: int) -> Iterator[Layout]:
    """One device per stage and equally many layers in each."""
    stages = min(problem.num_layers, problem.num_devices)
    bounds = tuple(problem.num_layers * s // stages for s in range(stages + 1))
    yield Layout(bounds, _one_each(stages), micro_batches)


BASELINES: dict[str, Baseline] = {
    "dp": data_parallel,
    "straight": straight,
    "even": even,
    "gpipe": straight,
    "torchgpipe": torchgpipe,
    "pipedream": pipedream,
    "hpgo": hpgo,
    "paper": paper,
    "paper-corrected": paper_corrected,
}

FIXED_SCHEDULES = {"gpipe": "gpipe", "torchgpipe": "gpipe"}
"""Baselines that are defined by their schedule, whichever is asked for."""

_LIMITS = {"pipedream": 600, "hpgo": 4000, "paper": 100, "paper-corrected": 60}


def candidates(problem: Problem) -> tuple[str, ...]:
    """The baselines that a search looks at before its own plans, so that it is never worse.

    Other planners' searches are left out where they would take as long as our own (by layers x
    devices): their plans lie within our search space.
    """
    size = problem.num_layers * problem.num_devices
    return tuple(
        name
        for name in BASELINES
        if FIXED_SCHEDULES.get(name, problem.schedule) == problem.schedule
        and size <= _LIMITS.get(name, size)
    )


def _one_each(stages: int) -> tuple[tuple[int, ...], ...]:
    return tuple((device,) for device in range(stages))
