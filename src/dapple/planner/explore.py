"""Further from a layout, by the estimate alone: for long pipelines, whose devices can sit in many ways.

`climb` moves one device to a neighbour at a time and stops where that does not help. Here stages are also
joined and split, devices go to any stage, two stages swap their numbers of replicas; and where nothing
around the best layout is better, the search goes on from the next best.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence

from dapple.planner.climb import best_cuts, climb
from dapple.planner.cuts import better_cuts, better_cuts_of_all
from dapple.planner.estimate import slowest_stages
from dapple.planner.layout import Layout
from dapple.planner.neighbours import exchanged_devices, moved_devices, other_counts, other_lengths
from dapple.planner.problem import Problem
from dapple.planner.traffic import Devices

Guess = tuple[float, Layout]
_START_ROUNDS = 3
"""How many cuts of layouts to begin with are moved in a row."""
_EXPANDED, _PATIENCE = 10, 4
"""Layouts whose surroundings are looked at, best first; so many at most without a better one."""
_LIMIT = 1.1
"""Layouts whose estimate is longer than the best by more are forgotten."""
_KEPT = 30
"""Most layouts that the caller hears of."""
_POLISHED = 3
"""Those of them whose cuts are improved, two at a time."""


def uphill(problem: Problem, layout: Layout) -> Iterator[Layout]:
    """As `climb`, with every change that is known here."""

    def around(problem: Problem, layout: Layout) -> list[Guess]:
        return _around(problem, layout, {_place(layout)}, every_count=True)

    return climb(problem, layout, around)


def best_first(problem: Problem, layouts: Sequence[Layout]) -> Iterator[Layout]:
    """The best layouts around some of one M, and around those in turn.

    Args:
        problem: what is planned.
        layouts: where to begin, at least one.
    """
    begin = better_cuts_of_all(problem, layouts, problem.policies(layouts[0]), _START_ROUNDS)
    found = {_place(layout): (seconds, layout) for seconds, layout in begin}
    best, in_vain, open_ = min(found.values()), 0, dict(found)
    for _ in range(_EXPANDED):
        if not open_ or in_vain == _PATIENCE:
            break
        _, layout = min(open_.values())
        del open_[_place(layout)]
        around = _around(problem, layout, found, every_count=False)
        close = {_place(o): (s, o) for s, o in around if s < best[0] * _LIMIT}
        found.update(close)
        open_.update(close)
        before, best = best, min(found.values())
        in_vain = in_vain + 1 if best == before else 0
    ranked = [layout for _, layout in sorted(found.values())[:_KEPT]]
    for layout in ranked[:_POLISHED]:
        yield better_cuts(problem, layout, problem.policies(layout))[1]
    yield from ranked


def _place(layout: Layout) -> tuple[tuple[Devices, ...], int]:
    return layout.devices, layout.micro_batches


def _around(
    problem: Problem,
    layout: Layout,
    known: Container[tuple[tuple[Devices, ...], int]],
    every_count: bool,
) -> list[Guess]:
    """What a change of devices, stages or M leads to with the best of the cuts around; best first."""
    focus = slowest_stages(problem, layout)
    changes = itertools.chain(
        moved_devices(problem, layout, focus),
        other_counts(problem, layout) if every_count else (),
        other_lengths(problem, layout, focus),
        exchanged_devices(problem, layout),
    )
    others = {_place(other): other for other in changes if _place(other) not in known}
    return best_cuts(problem, layout, others.values())
