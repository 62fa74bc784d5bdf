"""The planner of the paper: DAPPLE, section 4, with equations 1 and 2.

    T(j, g)     the first j layers on the devices g, the others as one last stage on all the rest:
                a whole plan, and its latency L
    a step      puts layers j..j' on m' more devices, placed Fresh, Append or Scatter First

For each (j, g) the best plan is remembered, and longer ones are made from it alone: a prefix is
judged with its suffix in one stage. The answer is the best of all T. Memory is no constraint,
rows need not be whole, and nothing of schedules or of shared links is known.

For the expanded stages (`dapple.planner.formulas`), with X = F + B, P the sum of X before a stage
and C that of B, L needs no second look at earlier stages:

    L = u_Q + max_s (AR_s - C_s)        u_s = M X_s + P_s        v_s = (M-1) X_s + P_s

and the rule for the pivot, from the last stage to the first, is: if u_s > v_Q then Q = s, as
Algorithm 1 prints it, or corrected: if u_s > u_Q. `FORMULAS` names both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dapple.planner.formulas import corrected_latency, expand, paper_latency
from dapple.planner.layout import Layout
from dapple.planner.paper_costs import Pair, PaperCosts
from dapple.planner.placement import Policy, place
from dapple.planner.problem import Problem
from dapple.planner.tables import Ints
from dapple.planner.traffic import Devices, Floats

Latency = Callable[[Sequence[float], Sequence[float], Sequence[float], int], float]
"""Forward, backward and AllReduce of the expanded stages, and M: to the step's seconds."""
FORMULAS: dict[str, Latency] = {"paper": paper_latency, "paper-corrected": corrected_latency}
"""By the planner's name: the pivot as printed, and the one that agrees with equations 1 and 2."""
_POLICIES: tuple[Policy, ...] = ("fresh", "append", "scatter")
_MOST_COUNTS = 16
"""Beyond so many devices stages take a multiple of a few of them."""
_FEW_DEVICES = 16
_SETS = (4, 2)
"""Device sets of one size that are looked at, the best ones: on few devices, and on many."""
_PLACES = (64, 24)
"""About so many cuts are looked at: on few devices, and on many."""


def paper(problem: Problem, micro_batches: int) -> Iterator[Layout]:
    """The plan of least latency by the printed formula."""
    yield _best(problem, micro_batches, corrected=False)


def paper_corrected(problem: Problem, micro_batches: int) -> Iterator[Layout]:
    """The same with the corrected pivot."""
    yield _best(problem, micro_batches, corrected=True)


def _best(problem: Problem, micro_batches: int, corrected: bool) -> Layout:
    many = int(problem.num_devices > _FEW_DEVICES)
    costs = PaperCosts(problem, micro_batches, _PLACES[many])
    recursion = _Recursion(costs, problem.machine_sizes, micro_batches, corrected)
    bounds, devices = recursion.run(_SETS[many])
    places = [int(costs.places[bound]) for bound in bounds]
    return Layout(tuple(places), devices, micro_batches)


def expected_seconds(problem: Problem, layout: Layout, latency: Latency) -> float:
    """What one of the `FORMULAS` expects of a layout, seconds; rows need not be whole."""
    costs = PaperCosts(problem, layout.micro_batches, problem.num_layers)
    where = [int(np.searchsorted(costs.places, bound)) for bound in layout.bounds]
    stages, links, reduces = [], [], []
    for (a, b), devices in zip(itertools.pairwise(where), layout.devices, strict=True):
        stages.append([float(prefix[b] - prefix[a]) for prefix in costs.stage(len(devices))])
        reduces.append(float(costs.allreduce(devices)[a, b]))
    for cut, pair in zip(where[1:-1], itertools.pairwise(layout.devices), strict=True):
        links.append([float(way[cut]) for way in costs.link(*pair)])
    forward, backward = (
        expand([stage[way] for stage in stages], [link[way] for link in links]) for way in (0, 1)
    )
    allreduce = expand(reduces, [0.0] * len(links))
    return latency(forward, backward, allreduce, layout.micro_batches)


@dataclass
class _Memo:
    """The best plan for each j on one device set, n + 1 values of j; W expanded stages.

    Attributes:
        seconds: T(j, g), infinite where there is none.
        time, back: P and C behind the prefix.
        ending: max AR_s - C_s over its stages.
        up, level: shape (n + 1, W), u of its expanded stages and what another one must exceed to be
            the pivot in their place; the last stage in the last column, -inf in front.
        last: per j the devices of its last stage.
        parent: per j the device set and the place before its last stage.
    """

    seconds: Floats
    time: Floats
    back: Floats
    ending: Floats
    up: Floats
    level: Floats
    last: list[Devices]
    parent: list[tuple[Devices, int]]

    @classmethod
    def empty(cls, places: int, width: int) -> _Memo:
        """No plan yet."""
        zeros, none = np.zeros(places), np.full((places, width), -np.inf)
        unknown = np.full(places, np.inf)
        return cls(
            unknown,
            zeros,
            zeros.copy(),
            -unknown,
            none,
            none.copy(),
            [()] * places,
            [((), 0)] * places,
        )


class _Stage(NamedTuple):
    """Some expanded stage of many plans at once: u, the pivot's level, and P, C behind it."""

    up: Floats
    level: Floats
    time: Floats
    back: Floats


class _Recursion:
    """The memo of one problem with one M."""

    def __init__(
        self, costs: PaperCosts, machine_sizes: tuple[int, ...], total: int, corrected: bool
    ) -> None:
        self.costs = costs
        self.sizes = machine_sizes
        self.total = total
        self.corrected = corrected
        self.everything = tuple(range(sum(machine_sizes)))
        self.places = len(costs.places)
        self.width = 2 * min(self.places, len(self.everything))
        self.step = -(-len(self.everything) // _MOST_COUNTS)

    def run(self, sets: int) -> tuple[tuple[int, ...], tuple[Devices, ...]]:
        """The places and the devices of the best plan; so many device sets of each size."""
        start = _Memo.empty(self.places, self.width)
        start.seconds[0] = self._whole()
        memos: dict[Devices, _Memo] = {(): start}
        best = float(start.seconds[0])
        where: tuple[Devices, int] = ((), 0)
        for size in range(0, len(self.everything), self.step):
            known = [(float(m.seconds.min()), g) for g, m in memos.items() if len(g) == size]
            for seconds, devices in sorted(known)[:sets]:
                memo = memos[devices]
                if seconds < best:
                    best, where = seconds, (devices, int(memo.seconds.argmin()))
                self._extend(memos, devices)
        return self._unfold(memos, *where)

    def _whole(self) -> float:
        """The latency of a single stage on all devices."""
        forward, backward = self.costs.stage(len(self.everything))
        both = forward[-1] - forward[0] + backward[-1] - backward[0]
        return float(self.total * both + self.costs.allreduce(self.everything)[0, -1])

    def _after(self, time: Floats, back: Floats, own: Pair) -> _Stage:
        """The stage of F and B `own` behind others of P and C."""
        both = own[0] + own[1]
        printed = (self.total - 1) * both + time
        # u is at least this in rounding too: a stage must not replace itself.
        up = printed + both
        return _Stage(up, up if self.corrected else printed, time + both, back + own[1])

    def _extend(self, memos: dict[Devices, _Memo], devices: Devices) -> None:
        """All steps from the plans on some devices."""
        memo = memos[devices]
        cuts = np.flatnonzero(np.isfinite(memo.seconds))
        if not len(cuts):
            return
        left = len(self.everything) - len(devices)
        for count in range(self.step, left, self.step):
            found = (place(policy, self.sizes, devices, count) for policy in _POLICIES)
            for chosen in dict.fromkeys(d for d in found if d is not None):
                taken = tuple(sorted((*devices, *chosen)))
                if taken not in memos:
                    memos[taken] = _Memo.empty(self.places, self.width)
                self._add(memos[taken], (devices, memo), cuts, chosen, taken)

    def _add(
        self,
        found: _Memo,
        before: tuple[Devices, _Memo],
        cuts: Ints,
        chosen: Devices,
        taken: Devices,
    ) -> None:
        """Put every j..j' on the chosen devices."""
        memo, costs = before[1], self.costs
        rest = tuple(sorted(set(self.everything).difference(taken)))
        time, back, ending = (v[cuts, None] for v in (memo.time, memo.back, memo.ending))
        link = np.zeros((2, len(cuts), 1))
        lasts = [memo.last[cut] for cut in cuts]
        for last in dict.fromkeys(lasts):
            rows = [row for row, other in enumerate(lasts) if other == last]
            if last:
                link[:, rows, 0] = np.array(costs.link(last, chosen))[:, cuts[rows]]
        entry = self._after(time, back, (link[0], link[1]))
        prefix = costs.stage(len(chosen))
        own = prefix[0] - prefix[0][cuts, None], prefix[1] - prefix[1][cuts, None]
        stage = self._after(entry.time, entry.back, own)
        ending = np.maximum(ending, costs.allreduce(chosen)[cuts] - entry.back)
        out = self._after(stage.time, stage.back, costs.link(chosen, rest))
        suffix = costs.stage(len(rest))
        remaining = suffix[0][-1] - suffix[0], suffix[1][-1] - suffix[1]
        final = self._after(out.time, out.back, remaining)
        whole = np.maximum(ending, costs.allreduce(rest)[:, -1] - out.back)
        top, level = final.up, final.level
        parts = [(out.up, out.level), (stage.up, stage.level), (entry.up, entry.level)]
        columns = np.flatnonzero(memo.up[cuts].max(axis=0) > -np.inf)[::-1]
        parts += [(memo.up[cuts, c, None], memo.level[cuts, c, None]) for c in columns]
        for up, own_level in parts:
            pivot = up > level
            top, level = np.where(pivot, up, top), np.where(pivot, own_level, level)
        seconds = top + whole
        ends = np.arange(self.places)
        seconds[(ends <= cuts[:, None]) | (ends == self.places - 1)] = np.inf
        which = seconds.argmin(axis=0)
        better = np.flatnonzero(seconds[which, ends] < found.seconds)
        which = which[better]
        origin = cuts[which]
        found.seconds[better] = seconds[which, better]
        found.time[better] = stage.time[which, better]
        found.back[better] = stage.back[which, better]
        found.ending[better] = ending[which, better]
        for old, new, one, two in (
            (memo.up, found.up, entry.up, stage.up),
            (memo.level, found.level, entry.level, stage.level),
        ):
            new[better, :-2] = old[origin, 2:]
            new[better, -2], new[better, -1] = one[which, 0], two[which, better]
        for end, cut in zip(better.tolist(), origin.tolist(), strict=True):
            found.last[end], found.parent[end] = chosen, (before[0], cut)

    def _unfold(
        self, memos: dict[Devices, _Memo], devices: Devices, place: int
    ) -> tuple[tuple[int, ...], tuple[Devices, ...]]:
        rest = tuple(sorted(set(self.everything).difference(devices)))
        bounds, stages = [self.places - 1], [rest]
        while devices:
            bounds.append(place)
            stages.append(memos[devices].last[place])
            devices, place = memos[devices].parent[place]
        return (0, *bounds[::-1]), tuple(stages[::-1])
