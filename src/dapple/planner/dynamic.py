"""The dynamic programme: for bounds t on the slowest stage, the shortest fill and drain.

A step takes about sum_s (F_s + B_s) + (M - 1) t + E: one micro-batch's way through all stages and
transfers, M - 1 times the slowest of them, and the part E of an AllReduce that the backwards of
earlier stages do not hide. For each t the programme finds the plan with the least sum in which no
stage and no transfer is slower than t; a few values of t, worked out together, trace the trade-off
between the two.

Nothing is looked at that cannot lead to a step below a limit. A stage begins after all before it
and works for M times its seconds, so sum_{a<s} (F_a + B_a) + M (F_s + B_s) <= limit; and a prefix
of the devices, busy for t seconds at most, gets only so far, and must get as far as leaves the
others no more than they can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dapple.planner.grid import Grid
from dapple.planner.layout import Layout
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats

_CLOSE = 1.01
"""Values of t are no closer to each other than about this factor."""


@dataclass(frozen=True)
class Found:
    """A layout, its slowest stage or transfer (seconds per micro-batch), and its guessed step."""

    layout: Layout
    slowest: float
    step_seconds: float


def trade_off(grid: Grid, limit: float, attached: bool, values: int) -> list[Layout]:
    """Layouts from the shortest fill and drain to the fastest slowest stage.

    Args:
        grid: the space.
        limit: layouts with longer steps are of no interest, seconds; may be infinite.
        attached: count a transfer as part of the stage behind it, as warm-up policy A does in
            effect: a stage that may not run ahead waits for its transfers.
        values: how many t are tried.
    """
    found: list[Found] = []
    if not np.isfinite(limit):
        found = best_below(grid, np.array([np.inf]), limit, attached)
        limit = min((plan.step_seconds for plan in found), default=0.0)
    low, high = grid.least_slowest, limit / grid.micro_batches
    if low <= high:
        bounds = np.array([high])
        if grid.micro_batches > 1 and low > 0:
            steps = min(values, int((np.log(high) - np.log(low)) / np.log(_CLOSE)) + 1)
            bounds = np.geomspace(low, high, steps + 1)[1:]
        found += best_below(grid, bounds, limit, attached)
    return list(dict.fromkeys(plan.layout for plan in found))


@dataclass
class _State:
    """Per (t, position e, mark j): the best way to run layers before j on devices before e.

    Attributes:
        total: sum of F + B and transfers.
        hidden: sum of B and gradient transfers, behind which an AllReduce can hide.
        exposed: E so far.
        origin: position and mark where the last stage began; mark -1: devices were left idle.
    """

    total: Floats
    hidden: Floats
    exposed: Floats
    origin: Ints

    @classmethod
    def start(cls, *shape: int) -> _State:
        """No layers on no devices."""
        state = cls(
            np.full(shape, np.inf), np.zeros(shape), np.zeros(shape), np.full((*shape, 2), -1)
        )
        state.total[:, 0, 0] = 0.0
        return state

    def skip_from(self, before: int, e: int) -> None:
        """Leave the devices from `before` to `e` idle, where that is shorter."""
        here = self.total[:, before] + self.exposed[:, before]
        t, j = np.nonzero(here < self.total[:, e] + self.exposed[:, e])
        for array in (self.total, self.exposed, self.hidden):
            array[t, e, j] = array[t, before, j]
        self.origin[t, e, j] = before, -1


class _Stages(NamedTuple):
    """P stages that may end at one position, each behind the best of its t's plans before it.

    Attributes:
        t: shape (P,), ascending, which bound they keep to.
        start, mark: shape (P,), position and mark where they begin.
        end: shape (P,), the last mark that they may reach.
        kind, reduce: shape (P,), which stage and which AllReduce of the frame.
        entry: shape (P,), seconds of all before, F + B of the transfer into the stage included.
        behind: shape (P,), the part of it that the AllReduce of the stage can hide behind.
    """

    t: Ints
    start: Ints
    mark: Ints
    end: Ints
    kind: Ints
    reduce: Ints
    entry: Floats
    behind: Floats


def best_below(grid: Grid, bounds: Floats, limit: float, attached: bool) -> list[Found]:
    """For each t the layout with the least sum in which nothing is slower, if there is one.

    Args:
        grid, limit, attached: as above.
        bounds: values of t, shape (T,), ascending.
    """
    programme = _Programme(grid, bounds, limit, attached)
    programme.run()
    found = (_read_back(grid, programme.state, number) for number in range(len(bounds)))
    return [plan for plan in found if plan is not None]


class _Programme:
    """One run of the dynamic programme."""

    def __init__(self, grid: Grid, bounds: Floats, limit: float, attached: bool) -> None:
        self.grid = grid
        self.bounds = bounds
        self.limit = limit
        self.attached = attached
        self.state = _State.start(len(bounds), len(grid.frame.positions), len(grid.marks))
        # The row past the last one, index -1, stands for "no transfer": the first stage.
        nothing = np.zeros((1, len(grid.marks)))
        self.slower, self.links, self.links_back = (
            np.concatenate([link, nothing])
            for link in (
                np.maximum(grid.link_forward, grid.link_backward),
                grid.link_forward + grid.link_backward,
                grid.link_backward,
            )
        )

    def run(self) -> None:
        """Position by position, every stage that may end there."""
        first, last = self.grid.band(self.bounds[-1])
        for e, sources in enumerate(self.grid.frame.sources):
            for before in sources:
                if before:
                    self.state.skip_from(before, e)
            if e and first[e] <= last[e]:
                stops = slice(int(first[e]), int(last[e]) + 1)
                stages = self._stages(e, stops)
                if len(stages.t):
                    self._add(e, stops, stages)

    def _stages(self, e: int, stops: slice) -> _Stages:
        """Those that end at position e and at one of the marks."""
        grid, frame, state = self.grid, self.grid.frame, self.state
        options = grid.options[frame.widths[grid.options] <= e]
        reached = np.isfinite(state.total[:, e - frame.widths[options], : stops.stop])
        t, option, mark = np.nonzero(reached)
        option = options[option]
        start = e - frame.widths[option]
        kind, link = frame.kind[start, option], frame.link[start, option]
        into, allowed = self.links[link, mark], self.bounds[t]
        entry = state.total[t, start, mark] + into
        longest = np.minimum(allowed, (self.limit - entry) / grid.micro_batches)
        if self.attached:
            longest = np.minimum(longest, allowed - into)
        end = np.minimum(grid.ends(kind, mark, longest), stops.stop - 1)
        keep = (end >= stops.start) & (end > mark) & (self.slower[link, mark] <= allowed)
        behind = state.hidden[t, start, mark] + self.links_back[link, mark]
        reduce = frame.reduce_kind[start, option]
        return _Stages(*(a[keep] for a in (t, start, mark, end, kind, reduce, entry, behind)))

    def _add(self, e: int, stops: slice, stages: _Stages) -> None:
        """Put the best of the stages behind each mark, for each t."""
        grid, state, marks = self.grid, self.state, np.arange(stops.start, stops.stop)
        t, start, mark, end, kind, reduce, entry, behind = stages
        sums = (entry - grid.stage[kind, mark])[:, None] + grid.stage[kind, stops]
        late = grid.after[reduce, mark, stops] - behind[:, None]
        np.maximum(late, state.exposed[t, start, mark][:, None], out=late)
        key = sums + late
        np.copyto(key, np.inf, where=(marks <= mark[:, None]) | (marks > end[:, None]))
        begins = np.flatnonzero(np.concatenate([[True], t[1:] != t[:-1]]))
        values, groups = t[begins], np.repeat(np.arange(len(begins)), np.diff([*begins, len(t)]))
        least = np.minimum.reduceat(key, begins, axis=0)
        better = least < state.total[values, e, stops] + state.exposed[values, e, stops]
        # The first of equal ones, whatever the rounding of others.
        rows = np.where(key == least[groups], np.arange(len(t))[:, None], len(t))
        group, column = np.nonzero(better)
        chosen = np.minimum.reduceat(rows, begins, axis=0)[group, column]
        value, j = values[group], marks[column]
        state.total[value, e, j] = sums[chosen, column]
        state.exposed[value, e, j] = late[chosen, column]
        own = grid.backward[kind[chosen], j] - grid.backward[kind[chosen], mark[chosen]]
        state.hidden[value, e, j] = behind[chosen] + own
        state.origin[value, e, j] = np.stack([start[chosen], mark[chosen]], axis=1)


def _read_back(grid: Grid, state: _State, number: int) -> Found | None:
    """The best plan for one t."""
    frame, j = grid.frame, len(grid.marks) - 1
    finals = state.total[number, :, j] + state.exposed[number, :, j]
    e = int(np.argmin(finals))
    if not np.isfinite(finals[e]):
        return None
    total = float(finals[e])
    cuts, sets, slowest = [j], [], 0.0
    while j > 0:
        start, i = (int(x) for x in state.origin[number, e, j])
        if i < 0:
            e = start
            continue
        option = int(np.flatnonzero(frame.widths == e - start)[0])
        kind, link = frame.kind[start, option], frame.link[start, option]
        slowest = max(slowest, float(grid.stage[kind, j] - grid.stage[kind, i]))
        if link >= 0:
            both = grid.link_forward[link, i], grid.link_backward[link, i]
            slowest = max(slowest, *map(float, both))
        sets.append(frame.devices(start, e))
        cuts.append(i)
        e, j = start, i
    bounds = tuple(int(grid.marks[i]) for i in reversed(cuts))
    layout = Layout(bounds, tuple(reversed(sets)), grid.micro_batches)
    return Found(layout, slowest, total + (grid.micro_batches - 1) * slowest)
