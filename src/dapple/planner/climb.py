"""From a layout uphill by the estimate alone: better cuts, then other devices or another M."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dapple.planner.cuts import better_cuts, better_cuts_of_all
from dapple.planner.estimate import slowest_stages
from dapple.planner.layout import Layout
from dapple.planner.neighbours import moved_devices, other_counts, other_lengths
from dapple.planner.problem import Problem

_ROUNDS = 6
"""How often devices or M are changed in a row."""
_CUT_ROUNDS = 2
"""How many cuts are moved in a row to judge a change."""
_RESHAPED = 12
"""Layouts of other lengths that are looked at closely."""
_KEPT = 3
"""Layouts of each round that the caller hears of."""


def climb(problem: Problem, layout: Layout) -> Iterator[Layout]:
    """The best layouts on the way from one to a better one, with whichever policy suits them.

    Cuts alone are a narrow neighbourhood: with one device more in a stage, all cuts may have to
    move. So each change of devices or of M is judged with the best of the cuts around.

    Args:
        problem: what is planned.
        layout: where to begin.
    """
    seconds, layout = better_cuts(problem, layout, problem.policies(layout))
    yield layout
    for _ in range(_ROUNDS):
        tried = changed(problem, layout)
        yield from (other for _, other in tried[:_KEPT])
        if not tried or tried[0][0] >= seconds * (1 - 1e-9):
            return
        seconds, layout = better_cuts(problem, tried[0][1], problem.policies(layout))
        yield layout


def changed(problem: Problem, layout: Layout) -> list[tuple[float, Layout]]:
    """A device moved or another M, each with the best of the cuts around; best estimate first."""
    policies = problem.policies(layout)
    focus = slowest_stages(problem, layout)
    others = {
        (other.devices, other.micro_batches): other
        for other in (*moved_devices(problem, layout, focus), *other_counts(problem, layout))
    }
    others.pop((layout.devices, layout.micro_batches), None)
    found = [replace(other, shard=layout.shard) for other in others.values()]
    return sorted(better_cuts_of_all(problem, found, policies, _CUT_ROUNDS))


def reshaped(problem: Problem, layout: Layout) -> list[tuple[float, Layout]]:
    """The best of those with more or fewer stages, each with the best of the cuts around."""
    focus = slowest_stages(problem, layout)
    others = [*dict.fromkeys(other_lengths(problem, layout, focus))]
    others = [replace(other, shard=layout.shard) for other in others]
    return sorted(better_cuts_of_all(problem, others, problem.policies(layout), 1))[:_RESHAPED]
