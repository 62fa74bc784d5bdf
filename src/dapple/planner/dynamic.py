"""The dynamic programme: for a bound t on the slowest stage, the shortest fill and drain.

A step takes about sum_s (F_s + B_s) + (M - 1) t + E: one micro-batch's way through all stages and
transfers, M - 1 times the slowest of them, and the part E of an AllReduce that the backwards of
earlier stages do not hide. For each t the programme finds the plan with the least sum in which no
stage and no transfer is slower than t; a few values of t trace the trade-off between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dapple.planner.grid import Grid
from dapple.planner.problem import Layout
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats


@dataclass(frozen=True)
class Effort:
    """How many values of t are tried.

    Attributes:
        close: the smallest feasible t is looked for up to this factor.
        between: values between that and the largest that can be useful.
    """

    close: float
    between: int


@dataclass(frozen=True)
class Found:
    """A layout, its slowest stage or transfer (seconds per micro-batch), and its guessed step."""

    layout: Layout
    slowest: float
    step_seconds: float


def trade_off(grid: Grid, attached: bool, effort: Effort) -> list[Found]:
    """Layouts from the shortest fill and drain to the fastest slowest stage.

    Args:
        grid: the space.
        attached: count a transfer as part of the stage behind it, as warm-up policy A does in
            effect: a stage that may not run ahead waits for its transfers.
        effort: how many values of t to try.
    """
    first = best_below(grid, np.inf, attached)
    if first is None:
        return []
    found = [first]
    if grid.micro_batches == 1:
        return found
    low, high = grid.least_slowest(), first.slowest
    while high > low * effort.close and high > 0:
        middle = float(np.sqrt(low * high)) if low > high * 1e-3 else high / 4
        plan = best_below(grid, middle, attached)
        if plan is None:
            low = middle
        else:
            found.append(plan)
            high = min(plan.slowest, middle)
    least_fill = first.step_seconds - (grid.micro_batches - 1) * first.slowest
    best = min(plan.step_seconds for plan in found)
    most = (best - least_fill) / (grid.micro_batches - 1)
    if most > high * effort.close:
        between = np.linspace(high, min(most, first.slowest), effort.between + 2)[1:-1]
        plans = (best_below(grid, float(t), attached) for t in between)
        found.extend(plan for plan in plans if plan is not None)
    return found


@dataclass
class _State:
    """Per (position e, mark j): the best way to run layers before j on devices before e.

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

    def skip_from(self, before: int, e: int) -> None:
        """Leave the devices from `before` to `e` idle, where that is shorter."""
        better = self.total[before] + self.exposed[before] < self.total[e] + self.exposed[e]
        for array in (self.total, self.exposed, self.hidden):
            array[e, better] = array[before, better]
        self.origin[e, better] = before, -1


def best_below(grid: Grid, bound: float, attached: bool) -> Found | None:
    """The layout with the least sum in which nothing is slower than `bound`; None: there is none."""
    frame, n, q = grid.frame, len(grid.marks), len(grid.frame.positions)
    state = _State(
        np.full((q, n), np.inf), np.zeros((q, n)), np.zeros((q, n)), np.full((q, n, 2), -1)
    )
    state.total[0, 0] = 0.0
    stage = np.where(grid.stage > bound, np.inf, grid.stage)
    slow = np.maximum(grid.link_forward, grid.link_backward) > bound
    links = np.where(slow, np.inf, grid.link_forward + grid.link_backward)
    # The row past the last one, index -1, stands for "no transfer": the first stage.
    links = np.concatenate([links, np.zeros((1, n))])
    links_back = np.concatenate([grid.link_backward, np.zeros((1, n))])
    for e in range(1, q):
        for before in frame.sources[e]:
            if before:
                state.skip_from(before, e)
        options = grid.options[frame.widths[grid.options] <= e]
        starts = e - frame.widths[options]
        reached = np.isfinite(state.total[starts]).any(axis=1)
        options, starts = options[reached], starts[reached]
        if not len(starts):
            continue
        kinds, transfer = frame.kind[starts, options], frame.link[starts, options]
        into = links[transfer]
        sums = (state.total[starts] + into)[:, :, None] + stage[kinds]
        if attached and np.isfinite(bound):
            sums[into[:, :, None] + stage[kinds] > bound] = np.inf
        behind = state.hidden[starts] + links_back[transfer]
        late = grid.after[frame.reduce_kind[starts, options]] - behind[:, :, None]
        np.maximum(late, state.exposed[starts][:, :, None], out=late)
        key = (sums + late).reshape(-1, n)
        choice = key.argmin(axis=0)
        j = np.flatnonzero(key[choice, np.arange(n)] < state.total[e] + state.exposed[e])
        o, i = np.divmod(choice[j], n)
        state.total[e, j], state.exposed[e, j] = sums[o, i, j], late[o, i, j]
        state.hidden[e, j] = behind[o, i] + grid.backward[kinds[o], i, j]
        state.origin[e, j, 0], state.origin[e, j, 1] = starts[o], i
    return _read_back(grid, state)


def _read_back(grid: Grid, state: _State) -> Found | None:
    frame, j = grid.frame, len(grid.marks) - 1
    finals = state.total[:, j] + state.exposed[:, j]
    e = int(np.argmin(finals))
    if not np.isfinite(finals[e]):
        return None
    total = float(finals[e])
    cuts, sets, slowest = [j], [], 0.0
    while j > 0:
        start, i = (int(x) for x in state.origin[e, j])
        if i < 0:
            e = start
            continue
        option = int(np.flatnonzero(frame.widths == e - start)[0])
        slowest = max(slowest, float(grid.stage[frame.kind[start, option], i, j]))
        link = frame.link[start, option]
        if link >= 0:
            both = grid.link_forward[link, i], grid.link_backward[link, i]
            slowest = max(slowest, *map(float, both))
        sets.append(frame.devices(start, e))
        cuts.append(i)
        e, j = start, i
    bounds = tuple(int(grid.marks[i]) for i in reversed(cuts))
    layout = Layout(bounds, tuple(reversed(sets)), grid.micro_batches)
    return Found(layout, slowest, total + (grid.micro_batches - 1) * slowest)
