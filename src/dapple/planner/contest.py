"""Candidates and who wins: layouts are simulated, the best and the refusals remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from dapple.planner.alternatives import one_stage_fewer, one_stage_more
from dapple.planner.baselines import BASELINES
from dapple.planner.bounds import layout_bounds
from dapple.planner.estimate import estimate_seconds
from dapple.planner.exact import families, in_order
from dapple.planner.layout import Layout
from dapple.planner.neighbours import shifted_cuts
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.warmup import raise_warmup, tune_warmup
from dapple.records import StagePlan

_LAYOUT_LIMIT = 20_000
_SIMULATION_LIMIT = 300
_BASELINE_TRIES = 2
_LONG = 20_000
"""Computations of a baseline that is simulated last, and only if it can still win."""
TOLD = ("dp", "straight")
"""Baselines whose step is told beside the winner's, whether it can win or not."""
_SHIFTED = 50_000
"""Computations of all layouts with a cut moved in the end."""
_RAISED, _TUNED = 1_000_000, 100_000
"""Stages x computations of the longest pipelines whose warm-up is raised, and lowered again."""
_SAME = 1e-9
"""Steps closer than this, relatively, are equal; then fewer stages win."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its simulated step in seconds."""

    name: str
    layout: Layout
    stages: tuple[StagePlan, ...]
    step_seconds: float


@dataclass
class Contest:
    """The best candidates so far, by planner and over all.

    Attributes:
        limit: seconds of a plan that is known already; others need not be looked for.
    """

    problem: Problem
    limit: float = math.inf
    best: Candidate | None = None
    candidates: dict[str, Candidate] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    _known: dict[Layout, Candidate | Refusal] = field(default_factory=dict)
    _postponed: list[tuple[Layout, str]] = field(default_factory=list)

    def try_baselines(
        self,
        names: Iterable[str],
        postpone: bool = False,
        may_win: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Every baseline, at the numbers of micro-batches that look best for it.

        Args:
            names: which baselines.
            postpone: leave for `try_postponed` what takes long to simulate or is of use only where
                it wins.
            may_win: whether a plan with this M may be the best; others are left out.
        """
        for name in names:
            guesses: list[tuple[float, Layout]] = []
            refused: list[Layout] = []
            for count in filter(may_win, self.problem.micro_batch_counts):
                for layout in self._variants(BASELINES[name](self.problem, count)):
                    warmup = self.problem.guess_warmup(layout)
                    if warmup is None:
                        refused.append(layout)
                    else:
                        guesses.append((estimate_seconds(self.problem, layout, warmup), layout))
            if not self.problem.refuses_rightly:
                for layout in refused:
                    self.judge(layout, name)
            elif not guesses:
                # Of more and smaller micro-batches a device holds less: these come closest.
                for layout in refused[-_BASELINE_TRIES:]:
                    self.judge(layout, name)
            for number, (_, layout) in enumerate(sorted(guesses)[:_BASELINE_TRIES]):
                told = number == 0 and name in TOLD and _computations(layout) <= _LONG
                if postpone and not told:
                    self._postponed.append((layout, name))
                else:
                    self.judge(layout, name)

    @property
    def judged(self) -> list[Candidate]:
        """All that was simulated."""
        return [one for one in self._known.values() if isinstance(one, Candidate)]

    def try_postponed(self) -> None:
        """The baselines that are left, unless their lower bound is above the best step."""
        for layout, name in self._postponed:
            if self.best is None or self._least(layout) <= self.best.step_seconds * (1 + _SAME):
                self.judge(layout, name)

    def _least(self, layout: Layout) -> float:
        """Seconds below which no step of a layout can be."""
        tables, bounds = self.problem.tables(layout.micro_batches), np.array([layout.bounds])
        (least,) = layout_bounds(tables, bounds, layout.devices, layout.shard)
        return float(least)

    def try_all(self) -> bool:
        """Every layout whose bound allows it to win; False: there are too many."""
        found = families(self.problem, _LAYOUT_LIMIT)
        if found is None:
            return False
        left = _SIMULATION_LIMIT
        for least, layout in in_order(found):
            best = min(self.limit, self.best.step_seconds if self.best else math.inf)
            if least > best * (1 + _SAME):
                return True
            if left <= 0:
                return False
            for variant in self.problem.variants(layout):
                left -= isinstance(self.judge(variant, "dapple"), Candidate)
        return True

    def settle(self) -> None:
        """While one stage more or fewer is faster than the best candidate, take that and tune it.

        So no plan that `explain` tells beside the chosen one is faster. Likewise with a cut moved by a
        layer, where simulations are short: the estimate chose the cuts, and errs by more than that.
        """
        while self._step_aside(self._joined_or_split) or self._step_aside(self._shifted):
            self.tune()

    def _joined_or_split(self, best: Candidate) -> list[Layout]:
        place = self.problem, best.stages, best.layout.micro_batches
        return [*one_stage_fewer(*place), *one_stage_more(*place)]

    def _shifted(self, best: Candidate) -> list[Layout]:
        found = shifted_cuts(best.layout)
        return found if len(found) * _computations(best.layout) <= _SHIFTED else []

    def _step_aside(self, around: Callable[[Candidate], list[Layout]]) -> bool:
        """Whether a plan around the best candidate is faster, and now the best."""
        best = self.best
        if best is None:
            return False
        found = [
            self.judge(layout, "dapple")
            for layout in around(best)
            if self._least(layout) < best.step_seconds
        ]
        faster = [one for one in found if isinstance(one, Candidate)]
        next_best = min(faster, key=lambda one: one.step_seconds, default=best)
        # Only what is strictly faster, so that this ends.
        self.best = next_best if next_best.step_seconds < best.step_seconds * (1 - _SAME) else best
        return self.best is not best

    def tune(self) -> None:
        """Give the best candidate the warm-up counts that suit it best."""
        best = self.best
        if best is None or best.layout.num_stages == 1 or not self.problem.tunes_warmup:
            return
        count = best.layout.micro_batches
        size = best.layout.num_stages * count * sum(map(len, best.layout.devices))
        if size > _RAISED:
            return
        stages, seconds = (tune_warmup if size <= _TUNED else raise_warmup)(
            best.stages,
            self.problem.most_in_flight(best.stages, count),
            lambda stages: self.problem.step_seconds(stages, count),
        )
        self.best = replace(best, stages=stages, step_seconds=seconds)

    def _variants(self, layouts: Iterable[Layout]) -> Iterator[Layout]:
        for layout in layouts:
            yield from self.problem.variants(layout)

    def seconds(self, layout: Layout) -> float | None:
        """The simulated step of a layout, or None if it does not fit."""
        verdict = self.judge(layout, "dapple")
        return verdict.step_seconds if isinstance(verdict, Candidate) else None

    def judge(self, layout: Layout, name: str) -> Candidate | Refusal:
        """Simulate a layout if it fits, and remember it or its refusal."""
        verdict = self._known.get(layout)
        if verdict is None:
            verdict = self._known[layout] = self._judge(layout, name)
        if isinstance(verdict, Refusal):
            # Another planner may have come up with the same layout first.
            verdict = replace(verdict, name=name)
            if name not in self.refusals or verdict.excess < self.refusals[name].excess:
                self.refusals[name] = verdict
            return verdict
        if name not in self.candidates or beats(verdict, self.candidates[name]):
            self.candidates[name] = verdict
        if self.best is None or beats(verdict, self.best):
            self.best = verdict
        return verdict

    def _judge(self, layout: Layout, name: str) -> Candidate | Refusal:
        stages = self.problem.fit(layout, name)
        if isinstance(stages, Refusal):
            return stages
        seconds = self.problem.step_seconds(stages, layout.micro_batches)
        return Candidate(name, layout, stages, seconds)


def _computations(layout: Layout) -> int:
    """What a simulation takes; all replicas of a single stage run alike."""
    units = sum(map(len, layout.devices)) if layout.num_stages > 1 else 1
    return 2 * layout.micro_batches * units


def beats(new: Candidate, old: Candidate) -> bool:
    """Shorter steps win; of equal ones fewer stages, then fewer devices and micro-batches."""
    if abs(new.step_seconds - old.step_seconds) > _SAME * old.step_seconds:
        return new.step_seconds < old.step_seconds
    return _rank(new.layout) < _rank(old.layout)


def _rank(layout: Layout) -> tuple[int, int, int, Layout]:
    devices = sum(map(len, layout.devices))
    return layout.num_stages, devices, layout.micro_batches, layout


def better(one: Candidate | None, other: Candidate | None) -> Candidate | None:
    """The first, unless the second beats it."""
    if one is None or other is None:
        return one or other
    return other if beats(other, one) else one
