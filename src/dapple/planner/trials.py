"""Plans judged under a schedule that the search itself does not know: by memory, and simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from dapple.costs import PipelineCosts, merge_equal_replicas, pipeline_costs
from dapple.errors import DappleError, PlanError
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.planner.reschedule import cut_anew
from dapple.planner.warmup import with_counts
from dapple.records import StagePlan
from dapple.simulator.simulation import checked_schedule, run

Stages = tuple[StagePlan, ...]

_WORK = 100_000
"""Computations that a search under another schedule may simulate; some 2 s."""
_OVERHEAD = 100
"""What costs, memory and the check of an order take, in computations."""
_SAME = 1e-9


@dataclass(frozen=True)
class Start:
    """A plan to put under the schedule.

    Attributes:
        problem: whose rows and memory count.
        layout: devices, M, and the stages' cuts before virtual stages.
        stages: of the layout, one per set of devices.
    """

    problem: Problem
    layout: Layout
    stages: Stages


@dataclass(frozen=True)
class Trial:
    """A plan under the schedule, with its simulated step in seconds; it fits."""

    start: Start
    stages: Stages
    step_seconds: float


@dataclass
class Trials:
    """All trials under one schedule.

    Attributes:
        schedule: its name, or a CSV file.
        virtual: stages per device.
        least_positions: of plans with fewer sets of devices none is tried.
        best: the shortest step so far.
        left: how many computations may still be simulated.
    """

    schedule: str
    virtual: int
    least_positions: int = 1
    best: Trial | None = None
    left: int = _WORK
    _known: dict[tuple[int, Stages], Trial | None] = field(default_factory=dict)

    def put(self, start: Start, always: bool = False) -> Trial | None:
        """A plan of the search under the schedule; its layers are cut anew for virtual stages.

        Args:
            start: the plan.
            always: simulate it however long that takes.
        """
        stages = start.stages
        if start.layout.num_stages < self.least_positions:
            return None
        if self.virtual > 1:
            rows = math.ceil(start.problem.global_batch_size / start.layout.micro_batches)
            try:
                stages = cut_anew(start.problem.model, stages, self.virtual, rows)
            except PlanError:
                return None
        return self.judge(start, stages, always)

    def judge(self, start: Start, stages: Stages, always: bool = False) -> Trial | None:
        """Simulate stages if they fit, or what can be made of them that does; None: nothing."""
        key = start.layout.micro_batches, stages
        if key not in self._known:
            self._known[key] = None
            for option in self._fitting(start, stages):
                self._simulate(key, start, option, always)
        return self._known[key]

    def seconds(self, start: Start, stages: Stages) -> float:
        """The simulated step of stages as they are; infinite if they or the schedule do not fit."""
        full = self._too_full(start, stages)
        return math.inf if full is None or full else self._seconds(start, stages, True)

    def _simulate(
        self, key: tuple[int, Stages], start: Start, stages: Stages, always: bool
    ) -> None:
        seconds, known = self._seconds(start, stages, always), self._known[key]
        if seconds < (known.step_seconds if known else math.inf) * (1 - _SAME):
            self._known[key] = trial = Trial(start, stages, seconds)
            if self.best is None or _rank(trial) < _rank(self.best):
                self.best = trial

    def _fitting(self, start: Start, stages: Stages) -> Iterator[Stages]:
        """The stages; where memory is short, with less in flight, with shared state, recomputed."""
        full = self._too_full(start, stages)
        if full is None:
            return
        if not full:
            yield stages
            return
        if self.schedule == "zero-bubble":
            yield from self._lowered(start, stages)
        if start.problem.shard and self.virtual == 1:
            stages = self._changed(start, stages, {"shard": "optimizer"})
            if not self._too_full(start, stages):
                yield stages
        if start.problem.recompute:
            stages = self._changed(start, stages, {"recompute": True})
            if not self._too_full(start, stages):
                yield stages

    def _lowered(self, start: Start, stages: Stages) -> Iterator[Stages]:
        """With as many micro-batches in flight on the first stage as fit."""
        low, high = 0, stages[0].warmup
        while high - low > 1:
            middle = (low + high) // 2
            if self._too_full(start, _capped(stages, middle)):
                high = middle
            else:
                low = middle
        if low:
            yield _capped(stages, low)

    def _changed(self, start: Start, stages: Stages, change: dict[str, object]) -> Stages:
        """The stages that do not fit with a change, until all fit or have it."""
        while True:
            before, full = stages, self._too_full(start, stages)
            stages = tuple(
                stage.model_copy(update=change) if number in (full or ()) else stage
                for number, stage in enumerate(stages)
            )
            if stages == before:
                return stages

    def _too_full(self, start: Start, stages: Stages) -> list[int] | None:
        """Stages whose devices' memory does not suffice; None: the schedule is not for these."""
        total = start.layout.micro_batches
        self.left -= total * len(stages)
        costs = self._costs(start, stages)
        try:
            made, room = checked_schedule(costs, self.schedule)
        except DappleError:
            return None
        return start.problem.too_full(stages, total, made, room)

    def _seconds(self, start: Start, stages: Stages, always: bool) -> float:
        """The simulated step; infinite if it can't be the best, or takes too long to simulate."""
        costs = self._costs(start, stages)
        if len(costs.positions) == costs.num_stages:
            costs = merge_equal_replicas(costs)
        least = self.best.step_seconds if self.best else math.inf
        if _busiest(costs) > least:
            return math.inf
        work = 3 * costs.num_micro_batches * (costs.num_units + costs.num_stages)
        if work > self.left and not always:
            return math.inf
        self.left -= work + _OVERHEAD
        return run(costs, self.schedule).step_seconds

    def _costs(self, start: Start, stages: Stages) -> PipelineCosts:
        problem, count = start.problem, start.layout.micro_batches
        return pipeline_costs(problem.model, stages, problem.global_batch_size, count)


def _capped(stages: Stages, most: int) -> Stages:
    return with_counts(stages, [min(stage.warmup, most) for stage in stages])


def _busiest(costs: PipelineCosts) -> float:
    """Seconds that the busiest device computes: no schedule's step is shorter."""
    counts = costs.first_small, costs.num_micro_batches - costs.first_small
    busy: dict[int, float] = {}
    for unit, device in enumerate(costs.device_of):
        pairs = zip(costs.forward[unit], costs.backward[unit], strict=True)
        own = sum(n * (f + b) for n, (f, b) in zip(counts, pairs, strict=False))
        busy[device] = busy.get(device, 0.0) + own
    return max(busy.values())


def _rank(trial: Trial) -> tuple[float, int, int]:
    layout = trial.start.layout
    return trial.step_seconds, len(trial.stages), sum(map(len, layout.devices))


def beats(new: Trial, old: Trial | None) -> bool:
    """The step is shorter by more than rounding."""
    return old is None or new.step_seconds < old.step_seconds * (1 - _SAME)
