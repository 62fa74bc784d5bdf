"""Plans with one stage fewer or one more than another one, the most promising of them.

The search judges them before it settles on a plan, and `explain` prints the best of them, so that
no plan is told that is faster than the chosen one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from dapple.planner.cuts import estimate_all
from dapple.planner.layout import Layout
from dapple.planner.local import guess_seconds, replicas_are_alike
from dapple.planner.neighbours import idle_choices
from dapple.planner.problem import Problem
from dapple.planner.traffic import Devices
from dapple.records import StagePlan

Value = TypeVar("Value")
_CUTS, _PARTS = 24, 8
"""Most places to split a stage at, and most ways to share out its devices."""
_EIGHTH = 4
"""Devices from which on such parts are whole eighths: often whole machines, with replicas that are alike."""
_FITTED = 100
"""Most layouts that are fitted into the memory one by one."""
_PROMISING = 4
"""Layouts that are worth a simulation."""
_LONG = 50_000
"""Simulated computations for all of them together; one is simulated however long it takes."""
_COSTLY = 30_000
"""Computations of one beyond which those whose replicas are alike, which takes less, are looked at first."""


def one_stage_fewer(problem: Problem, stages: Sequence[StagePlan], count: int) -> list[Layout]:
    """Two neighbouring stages joined, on the devices of both; the best estimates first.

    Args:
        problem: what is planned.
        stages: a plan's.
        count: its M.
    """
    return _promising(problem, _joined(stages, count))


def one_stage_more(problem: Problem, stages: Sequence[StagePlan], count: int) -> list[Layout]:
    """A stage split, on its devices or with an idle one beside; the best estimates first.

    Args:
        problem, stages, count: as above.
    """
    return _promising(problem, _split(problem, stages, count))


def _joined(stages: Sequence[StagePlan], count: int) -> Iterator[Layout]:
    for s in range(len(stages) - 1):
        devices = [stage.devices for stage in stages]
        devices[s : s + 2] = [tuple(sorted(stages[s].devices + stages[s + 1].devices))]
        bounds = [0, *(stage.stop for stage in stages)]
        del bounds[s + 1]
        yield Layout(tuple(bounds), tuple(devices), count)


def _split(problem: Problem, stages: Sequence[StagePlan], count: int) -> Iterator[Layout]:
    bounds = [0, *(stage.stop for stage in stages)]
    devices = tuple(stage.devices for stage in stages)
    for s, stage in enumerate(stages):
        cuts = _evenly(range(stage.start + 1, stage.stop), _CUTS)
        for parts in _in_two(stage.devices, idle_choices(problem, devices, s)) if cuts else ():
            sets = (*devices[:s], *parts, *devices[s + 1 :])
            for cut in cuts:
                yield Layout(tuple(sorted((*bounds, cut))), sets, count)


def _in_two(own: Devices, idle: Sequence[int]) -> Iterator[tuple[Devices, Devices]]:
    """The devices shared out, in their order; or one that is idle before or behind them."""
    eighth = len(own) // _PARTS
    whole = range(eighth, len(own), eighth) if eighth >= _EIGHTH else ()
    for first in whole or _evenly(range(1, len(own)), _PARTS):
        yield own[:first], own[first:]
    for device in idle:
        yield (device,), own
        yield own, (device,)


def _evenly(values: Sequence[Value], count: int) -> Sequence[Value]:
    return values if len(values) <= count else values[:: -(-len(values) // count)]


def _promising(problem: Problem, layouts: Iterable[Layout]) -> list[Layout]:
    """Those with the least estimates, infinite where they do not fit, under the policy that suits each."""
    found = list(layouts)
    if not found:
        return []
    work = 2 * found[0].micro_batches * sum(map(len, found[0].devices))
    most = max(1, min(_PROMISING, _LONG // work))
    # What saves memory is up to `Problem.fit`, layout by layout.
    saving = problem.recompute or problem.shard
    guesses = _fitted(problem, found) if saving else _estimated(problem, found)
    ranked = [layout for _, layout in sorted(guesses)]
    if work > _COSTLY:
        ranked.sort(key=lambda layout: not replicas_are_alike(problem, layout))
    return ranked[:most]


def _fitted(problem: Problem, layouts: Sequence[Layout]) -> Iterator[tuple[float, Layout]]:
    for plain in _evenly(layouts, _FITTED):
        for policy in problem.policies(plain):
            layout = replace(plain, policy=policy, recompute=problem.recompute, shard=problem.shard)
            guess = guess_seconds(problem, layout)
            yield math.inf if guess is None else guess, layout


def _estimated(problem: Problem, layouts: Sequence[Layout]) -> Iterator[tuple[float, Layout]]:
    policies = problem.policies(layouts[0])
    firsts = {layout.devices: layout for layout in layouts}
    places = {devices: number for number, devices in enumerate(firsts)}
    which = np.array([places[layout.devices] for layout in layouts])
    bounds = np.array([layout.bounds for layout in layouts])
    guessed = estimate_all(problem, [*firsts.values()], which, bounds, policies)
    best = guessed.argmin(axis=0).tolist()
    for layout, policy, seconds in zip(layouts, best, guessed.min(axis=0).tolist(), strict=True):
        yield seconds, replace(layout, policy=policies[policy])
