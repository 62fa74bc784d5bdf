"""From a layout uphill by the estimate alone: better cuts, then other devices or another M."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


Around = Callable[[Problem, Layout], list[tuple[float, Layout]]]
"""From a layout to those around it with their estimates, best first."""


def climb(problem: Problem, layout: Layout, around: Around | None = None) -> Iterator[Layout]:
    """The best layouts on the way from one to a better one, with whichever policy suits them.

    Cuts alone are a narrow neighbourhood: with one device more in a stage, all cuts may have to
    move. So each change of devices or of M is judged with the best of the cuts around.

    Args:
        problem: what is planned.
        layout: where to begin.
        around: the changes; None: `changed`.
    """
    around = around or changed
    seconds, layout = better_cuts(problem, layout, problem.policies(layout))
    yield layout
    for _ in range(_ROUNDS):
        tried = around(problem, layout)
        yield from (other for _, other in tried[:_KEPT])
        if not tried or tried[0][0] >= seconds * (1 - 1e-9):
            return
        seconds, layout = better_cuts(problem, tried[0][1], problem.policies(layout))
        yield layout


def changed(problem: Problem, layout: Layout) -> list[tuple[float, Layout]]:
    """A device moved or another M, each with the best of the cuts around; best estimate first."""
    focus = slowest_stages(problem, layout)
    others = {
        (other.devices, other.micro_batches): other
        for other in (*moved_devices(problem, layout, focus), *other_counts(problem, layout))
    }
    others.pop((layout.devices, layout.micro_batches), None)
    return best_cuts(problem, layout, others.values())


def reshaped(problem: Problem, layout: Layout) -> list[tuple[float, Layout]]:
    """The best of those with more or fewer stages, each with the best of the cuts around."""
    focus = slowest_stages(problem, layout)
    others = dict.fromkeys(other_lengths(problem, layout, focus))
    return best_cuts(problem, layout, others, rounds=1)[:_RESHAPED]


def best_cuts(
    problem: Problem, layout: Layout, others: Iterable[Layout], rounds: int = _CUT_ROUNDS
) -> list[tuple[float, Layout]]:
    """Changes of a layout, each with the best of the cuts around; best estimate first."""
    found = [replace(other, shard=layout.shard) for other in others]
    return sorted(better_cuts_of_all(problem, found, problem.policies(layout), rounds))
