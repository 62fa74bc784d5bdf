"""One referee for everybody's plans: our simulator, with the M and the warm-up that suit each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dapple.planner import SearchOptions
from dapple.planner.balance import balanced_bounds
from dapple.planner.baselines import BASELINES
from dapple.planner.estimate import estimate_seconds
from dapple.planner.layout import Layout
from dapple.planner.placement import POLICIES, place
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.warmup import tune_warmup
from dapple.records import ModelProfile, Plan, StagePlan

ALONE = SearchOptions(baselines=False)
"""Our search without other planners' plans among its candidates."""
SAME = 1e-9
_FAR = 1.15
"""Layouts whose estimate is so many times the best one's are not simulated."""


@dataclass(frozen=True)
class Judged:
    """A plan and its simulated step in seconds."""

    stages: tuple[StagePlan, ...]
    micro_batches: int
    seconds: float

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """Per stage its end and its replicas."""
        return tuple((stage.stop, stage.replicas) for stage in self.stages)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Per stage its replicas."""
        return tuple(stage.replicas for stage in self.stages)


def judged(plan: Plan) -> Judged:
    """A predicted plan."""
    assert plan.predicted is not None
    return Judged(plan.stages, plan.num_micro_batches, plan.predicted.step_seconds)


def best_of(problem: Problem, layouts: Iterable[Layout]) -> Judged | None:
    """The shortest step of some layouts, with the warm-up that suits it; None: none fits."""
    guessed = []
    for layout in layouts:
        for variant in problem.variants(layout):
            counts = problem.guess_warmup(variant)
            if counts is not None:
                guessed.append((estimate_seconds(problem, variant, counts), variant))
    guessed.sort()
    found: list[tuple[float, Layout, tuple[StagePlan, ...]]] = []
    for seconds, layout in guessed:
        if seconds > guessed[0][0] * _FAR and found:
            break
        stages = problem.fit(layout, "")
        if not isinstance(stages, Refusal):
            found.append((problem.step_seconds(stages, layout.micro_batches), layout, stages))
    if not found:
        return None
    seconds, layout, stages = min(found)
    count = layout.micro_batches
    if len(stages) > 1 and problem.tunes_warmup:
        most = problem.most_in_flight(stages, count)
        stages, seconds = tune_warmup(stages, most, lambda s: problem.step_seconds(s, count))
    return Judged(stages, count, seconds)


def baseline(problem: Problem, name: str) -> Iterator[Layout]:
    """A named planner's layouts for every number of micro-batches."""
    for count in problem.micro_batch_counts:
        yield from BASELINES[name](problem, count)


def straight_by_blocks(problem: Problem, blocks: Sequence[float]) -> Iterator[Layout]:
    """One device per stage and equally many of the repeated blocks (1, others 0) in each."""
    bounds = balanced_bounds(list(blocks), problem.num_devices)
    devices = tuple((device,) for device in range(problem.num_devices))
    for count in problem.micro_batch_counts:
        yield Layout(bounds, devices, count)


def two_stages(
    problem: Problem, replicas: tuple[int, int], cuts: Iterable[int]
) -> Iterator[Layout]:
    """Two stages with given replicas: every cut, M and placement of the paper's policies."""
    everything = set(range(problem.num_devices))
    sets = {place(policy, problem.machine_sizes, (), replicas[0]) for policy in POLICIES}
    for first in sorted(s for s in sets if s is not None):
        second = tuple(sorted(everything.difference(first)))
        for cut, count in itertools.product(cuts, problem.micro_batch_counts):
            yield Layout((0, cut, problem.num_layers), (first, second), count)


def label(plan: Judged, profile: ModelProfile) -> str:
    """A plan in a few words, such as "15:1 after MaxPool2d_5"."""
    stages = plan.stages
    if len(stages) == 1:
        return "DP" if stages[0].replicas > 1 else "1"
    replicas = [stage.replicas for stage in stages]
    if len(stages) <= 3:
        cuts = ", ".join(profile.layers[stage.stop - 1].name for stage in stages[:-1])
        return f"{':'.join(map(str, replicas))} after {cuts}"
    if max(replicas) == 1:
        return f"straight, {len(stages)} stages"
    runs = [(width, len(list(group))) for width, group in itertools.groupby(replicas)]
    return ":".join(f"{width}" if n == 1 else f"{width}^{n}" for width, n in runs)
