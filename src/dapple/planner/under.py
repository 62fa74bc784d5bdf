"""The search for schedules that `dapple.planner.general` does not know: zero bubble, virtual stages.

The search for early backward has simulated many plans on its way. They, and one stage per device,
are put under the schedule that is wanted, best first and of every length some, their layers cut
anew for virtual stages. The best of them are then changed a little while that helps, as there, but
under that schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from dapple.planner.baselines import BASELINES
from dapple.planner.climb import changed, reshaped
from dapple.planner.contest import Candidate, Contest
from dapple.planner.estimate import slowest_stages
from dapple.planner.local import guess_seconds
from dapple.planner.neighbours import neighbours
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.trials import Stages, Start, Trial, Trials, beats
from dapple.planner.warmup import raise_warmup

_STRAIGHT = ("straight", "even")
"""Baselines that schedules with small bubbles are made for."""
_IMPROVED = 3
"""Trials on different devices or with another M that are improved."""
_NEARBY = 60
"""Neighbours of a trial that are looked at, best estimate first."""
_STEPS = (1, -1, 2, -2, 4, -4)
"""How far, in layers, cuts of virtual stages are moved."""


def straight_contests(problem: Problem) -> list[Contest]:
    """One device per stage, tuned for early backward."""
    contests = []
    for name in _STRAIGHT:
        run = Contest(problem)
        run.try_baselines([name])
        run.tune()
        contests.append(run)
    return contests


def best_under(
    contests: Sequence[Contest],
    schedule: str,
    virtual: int,
    *,
    around: bool = True,
    least_positions: int = 1,
) -> Trial | None:
    """The best plan under a schedule.

    Args:
        contests: searches under early backward; the best of each is tried first.
        schedule: one that is not searched for itself, or a CSV file.
        virtual: stages per device.
        around: look at more than the best of each.
        least_positions: of plans with fewer sets of devices none is tried.

    Returns:
        It is at least as fast as the best of every contest put under the schedule; None: nothing
        fits, or nothing can be put under it.
    """
    trials = Trials(schedule, virtual, least_positions)
    firsts = [_start(run, run.best) for run in contests if run.best is not None]
    others = _in_turn(
        (run, candidate) for run in contests for candidate in run.judged if candidate != run.best
    )
    found: dict[object, Trial] = {}
    half = trials.left // 2
    more = [*others, *_every_count(contests)] if around else []
    for number, start in enumerate([*firsts, *more]):
        if number >= len(firsts) and trials.left < half:
            break
        trial = trials.put(start, always=number < len(firsts))
        key = start.layout.devices, start.layout.micro_batches
        if trial is not None and (key not in found or beats(trial, found[key])):
            found[key] = trial
    ranked = sorted(found.values(), key=lambda trial: trial.step_seconds)
    for trial in ranked[:_IMPROVED] if around else ():
        _improve(trials, trial)
    return _tuned(trials)


def _start(run: Contest, candidate: Candidate) -> Start:
    return Start(run.problem, candidate.layout, candidate.stages)


def _in_turn(candidates: Iterable[tuple[Contest, Candidate]]) -> Iterator[Start]:
    """The best of each number of stages, then the second best of each, and so on."""
    by_length: dict[int, list[tuple[Contest, Candidate]]] = {}
    for run, candidate in sorted(candidates, key=lambda pair: pair[1].step_seconds):
        by_length.setdefault(candidate.layout.num_stages, []).append((run, candidate))
    for row in itertools.zip_longest(*by_length.values()):
        yield from (_start(*pair) for pair in row if pair is not None)


def _every_count(contests: Sequence[Contest]) -> Iterator[Start]:
    """One device per stage for every M."""
    problem = contests[0].problem
    for count, name in itertools.product(problem.micro_batch_counts, _STRAIGHT):
        for layout in BASELINES[name](problem, count):
            stages = problem.fit(layout, name)
            if not isinstance(stages, Refusal):
                yield Start(problem, layout, stages)


def _improve(trials: Trials, trial: Trial) -> None:
    """From a trial to better ones around it, while the work allows it."""
    while trials.left > 0:
        best, until = trial, trials.left - trials.left // 3
        for near in _nearby(trials, trial):
            if near is not None and beats(near, best):
                best = near
            if trials.left < until:
                break
        if best is trial:
            return
        trial = best


def _nearby(trials: Trials, trial: Trial) -> Iterator[Trial | None]:
    """Trials that differ in one respect, in the order of their estimates for early backward."""
    start, problem = trial.start, trial.start.problem
    if trials.virtual > 1:
        yield from (trials.judge(start, stages) for stages in _moved_cuts(trial.stages))
    layout = start.layout
    others = [
        *neighbours(problem, layout, slowest_stages(problem, layout)),
        *(other for _, other in changed(problem, layout)),
        *(other for _, other in reshaped(problem, layout)),
    ]
    guesses = {other: guess_seconds(problem, other) for other in dict.fromkeys(others)}
    ranked = sorted((guess, other) for other, guess in guesses.items() if guess is not None)
    for _, other in ranked[:_NEARBY]:
        fitting = problem.fit(other, "dapple")
        if not isinstance(fitting, Refusal):
            yield trials.put(Start(problem, other, fitting))


def _moved_cuts(stages: Stages) -> Iterator[Stages]:
    for step, cut in itertools.product(_STEPS, range(1, len(stages))):
        layer = stages[cut].start + step
        if stages[cut - 1].start < layer < stages[cut].stop:
            changes = {cut - 1: {"stop": layer}, cut: {"start": layer}}
            yield tuple(
                stage.model_copy(update=changes.get(number, {}))
                for number, stage in enumerate(stages)
            )


def _tuned(trials: Trials) -> Trial | None:
    """The best trial with more micro-batches in flight, where that helps and fits."""
    best = trials.best
    if best is None or trials.schedule != "zero-bubble" or best.start.problem.warmup in ("A", "B"):
        return best
    problem, count = best.start.problem, best.start.layout.micro_batches
    stages, seconds = raise_warmup(
        best.stages,
        problem.most_in_flight(best.stages, count),
        lambda stages: trials.seconds(best.start, stages),
    )
    return Trial(best.start, stages, seconds) if math.isfinite(seconds) else best
