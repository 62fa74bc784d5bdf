"""From estimates to steps: the best are simulated, and changed a little while that helps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dapple.planner.climb import changed, reshaped
from dapple.planner.estimate import estimate_seconds, slowest_stages
from dapple.planner.layout import Layout
from dapple.planner.neighbours import neighbours
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.traffic import Devices

_STARTS, _SMALL_STARTS, _SMALL = 3, 8, 100
"""Simulated layouts that are improved; more of them up to so many layers x devices."""
_WORK = 150_000
"""Simulated computations that a search may spend; a third of them before the local changes."""
_LEAST_STARTS, _LEAST_TRIES, _LEAST_ROUNDS = 6, 2, 2
"""How many are simulated at least, however long it takes: to begin with, per round, rounds."""
_COSTLY = 30_000
"""Computations beyond which a layout is not simulated just to have simulated a few."""
_OVERHEAD = 2_000
"""What the start of a simulation costs, in computations."""


class Judge(Protocol):
    """Whoever simulates layouts and remembers the best."""

    def seconds(self, layout: Layout) -> float | None:
        """The simulated step of a layout, or None if it does not fit."""


@dataclass
class LocalSearch:
    """One search; `judge` keeps its results."""

    problem: Problem
    judge: Judge
    seen: set[Layout] = field(default_factory=set)  # what was changed before, here or by others
    _longer: dict[tuple[Devices, ...], dict[int, float]] = field(default_factory=dict)
    _least_longer: dict[int, float] = field(default_factory=dict)
    _left: int = _WORK

    def run(self, estimates: Mapping[Layout, float]) -> tuple[float, Layout] | None:
        """Simulate the best, and improve the best of these on different devices or with other M.

        Args:
            estimates: seconds of the layouts to begin with.

        Returns:
            Seconds of the best, and itself; None: nothing fits.
        """
        small = self.problem.num_layers * self.problem.num_devices <= _SMALL
        most = _SMALL_STARTS if small else _STARTS
        starts = self._simulate_best(estimates, _WORK // 3, _LEAST_STARTS, most)
        found = [
            self._improve(layout, seconds)
            for number, (seconds, layout) in enumerate(starts)
            if number == 0 or self._left > 0
        ]
        return min(found, default=None)

    def _simulate_best(
        self, guesses: Mapping[Layout, float], work: int, least: int, most: int
    ) -> list[tuple[float, Layout]]:
        """Simulate the best guesses, at least a few, as far as the work suffices.

        Contention makes steps longer than guessed, much the same for all plans on the same
        devices with the same M. So what was seen of the others corrects a guess. Slow links do so
        the more, the more stages there are, so every second time that counts as well. What is
        guessed to take longer than the best `most` is left out: hardly any guess is too long.

        Returns:
            Seconds and layouts: the best `most` on different devices or with other M, best first.
        """
        results: list[tuple[float, Layout]] = []
        best: list[tuple[float, Layout]] = []
        left = dict(guesses)
        for turn in itertools.count():
            if not left:
                break
            longer = functools.partial(self._longer_than, alike=turn % 2 == 1)
            layout = min(left, key=lambda other: (left[other] * longer(other), other))
            guess = left.pop(layout)
            cost = _OVERHEAD + 2 * layout.micro_batches * self._units(layout)
            if cost > work:
                if len(results) >= least:
                    break
                if cost > _COSTLY and (results or left):
                    continue
            work -= cost
            self._left -= cost
            seconds = self.judge.seconds(layout)
            if seconds is not None:
                results.append((seconds, layout))
                ratio = seconds / guess if guess else 1.0
                self._longer.setdefault(layout.devices, {})[layout.micro_batches] = ratio
                alike = self._least_longer.get(layout.num_stages, ratio)
                self._least_longer[layout.num_stages] = min(alike, ratio)
                best = _different(results)[:most]
                if len(best) == most:
                    left = {other: g for other, g in left.items() if g < best[-1][0]}
        return best

    def _units(self, layout: Layout) -> int:
        """How many replicas are simulated: of equal ones one, where rows and machines divide evenly."""
        alike = replicas_are_alike(self.problem, layout)
        return 4 * layout.num_stages if alike else sum(map(len, layout.devices))

    def _longer_than(self, layout: Layout, alike: bool) -> float:
        """The last simulated step of plans like this one over its guess.

        Args:
            alike: of devices not seen yet, expect at least what all plans of as many stages took.
        """
        seen = self._longer.get(layout.devices)
        if seen is None:
            return self._least_longer.get(layout.num_stages, 1.0) if alike else 1.0
        return seen.get(layout.micro_batches) or min(seen.values())

    def _improve(self, layout: Layout, seconds: float) -> tuple[float, Layout]:
        rounds = 0
        while (self._left > 0 or rounds < _LEAST_ROUNDS) and layout not in self.seen:
            rounds += 1
            self.seen.add(layout)
            nearby = neighbours(self.problem, layout, slowest_stages(self.problem, layout))
            nearby += [other for _, other in changed(self.problem, layout)]
            nearby += [other for _, other in reshaped(self.problem, layout)]
            guesses = {other: guess_seconds(self.problem, other) for other in nearby}
            known = {other: guess for other, guess in guesses.items() if guess is not None}
            known = {other: guess for other, guess in known.items() if guess < seconds}
            best = self._simulate_best(known, self._left // 6, _LEAST_TRIES, 1)
            if not best or best[0][0] >= seconds * (1 - 1e-9):
                break
            seconds, layout = best[0]
        return seconds, layout


def _different(results: Iterable[tuple[float, Layout]]) -> list[tuple[float, Layout]]:
    """The best result of all layouts on the same devices with the same M, best first."""
    found: dict[Hashable, tuple[float, Layout]] = {}
    for seconds, layout in sorted(results):
        found.setdefault((layout.devices, layout.micro_batches), (seconds, layout))
    return list(found.values())


def replicas_are_alike(problem: Problem, layout: Layout) -> bool:
    """Whether rows and machines divide evenly, so that the simulator merges a stage's replicas."""
    rows, machine = problem.tables(layout.micro_batches).first_rows, problem.symmetry.period
    return bool(machine) and all(
        rows % len(devices) == 0
        and devices[-1] - devices[0] == len(devices) - 1
        and (len(devices) % machine == 0 or machine % len(devices) == 0)
        and devices[0] % min(len(devices), machine) == 0
        for devices in layout.devices
    )


def guess_seconds(problem: Problem, layout: Layout) -> float | None:
    """The estimate of a layout with the warm-up that fits; None: it does not fit."""
    if layout.recompute or layout.shard:
        stages = problem.fit(layout, "dapple")
        if isinstance(stages, Refusal):
            return None
        warmup, again = [s.warmup for s in stages], [bool(s.recompute) for s in stages]
        return estimate_seconds(problem, layout, warmup, again)
    guessed = problem.guess_warmup(layout)
    return None if guessed is None else estimate_seconds(problem, layout, guessed)
