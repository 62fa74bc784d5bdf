"""The search that scales: dynamic programme for many M, then the simulator and local changes.

1. for every M, on few cuts: layouts from the dynamic programme, ranked by the estimate; not for
   those M with which, by the lower bound, nothing can be faster than what was simulated before,
   and then the bound of all plans, which says how much shorter a step can still become
2. for the best few M, on all cuts, in every device order: more of them
3. the best of all, on different devices, are improved by the estimate alone
4. the best estimates are simulated, and changed while that helps: see `local`
5. if the best is a long pipeline: the same again from layouts further away, see `explore`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from dapple.planner.certificate import Prospects, lower_bound
from dapple.planner.climb import climb
from dapple.planner.cuts import better_cuts, better_cuts_of_all
from dapple.planner.dynamic import trade_off
from dapple.planner.explore import best_first, uphill
from dapple.planner.frame import Frame, choose_step, device_orders, make_frame
from dapple.planner.grid import Grid, choose_marks, make_grid
from dapple.planner.layout import Layout
from dapple.planner.local import Judge, LocalSearch, guess_seconds
from dapple.planner.neighbours import pack
from dapple.planner.problem import Problem
from dapple.planner.tables import Ints
from dapple.planner.traffic import Devices
from dapple.schedule import warmup_counts

_SCOUT_MARKS, _MARKS = 20, 44
_ALL_MARKS, _FEW_DEVICES = 64, 32
"""With so few layers and devices every cut is looked at: equal stages may need any of them."""
_SCOUT_VALUES, _VALUES = 4, 10
"""Values of t that the dynamic programme tries."""
_LIMIT = 1.1
"""Layouts whose estimate must be longer than the best by more are not looked for."""
_EQUAL = (1, 2, 4)
"""Widths that are also looked at in all stages alike: long pipelines are best even, or nearly so."""
_IN_FLIGHT = (1, 2, 4)
"""Micro-batches that every stage must have room for; more than one where memory is short."""
_ROUGH_ROUNDS = 3
"""How often cuts are moved where it is only to be found out which M are good."""
_SPLIT_ROUNDS = 6
"""How often the one cut between two stages is moved."""
_POLISHED = 3
"""Layouts on different devices whose cuts are improved whenever the dynamic programme has run."""
_CLIMBED = 6
"""Layouts on different devices that are improved before anything is simulated."""
_SMALL, _LONG = 100, (4, 16)
"""Of more layers x devices, pipelines of such lengths are looked for further away."""
_EXPLORED, _UPHILL = 2, 8
"""Best M whose layouts are explored best first, and layouts of different length or M uphill."""
_ALIKE = 2
"""How many of the best estimates are simulated where they are the same."""
_FILL = 0.3
"""Part of one micro-batch's seconds on a single device that filling the pipeline takes, roughly."""
_BEST_COUNTS, _IN_EVERY_ORDER = 4, 2
"""Best M that are looked at closely; of equal devices so many in other orders, too."""
_NOTHING = 0.0025
"""Gap to the bound that is none: the bound itself is found up to 0.2 %."""
_GOOD = 1.2
"""How much longer than the best a step may look for its M to be looked at closely."""


@dataclass
class GeneralSearch:
    """One search; `judge` keeps its results."""

    problem: Problem
    judge: Judge
    prospects: Prospects | None = None  # to leave out M by; None: all are looked at
    _shortest: float = math.inf
    _gain: float = math.inf
    _estimates: dict[Layout, float] = field(default_factory=dict)
    _frames: dict[tuple[Devices, int, int], Frame] = field(default_factory=dict)
    _grids: dict[tuple[Devices, int, int, int], Grid] = field(default_factory=dict)

    def run(self, known: Iterable[Layout] = ()) -> None:
        """Search.

        Args:
            known: layouts to improve beside those that the dynamic programme finds.
        """
        self._estimate(known)
        self._scout()
        self._split_in_two()
        self._find_gain()
        if self._gain > _NOTHING:
            self._look_further()
        # What is estimated to take longer by more than that does not get shorter than the shortest.
        most = self._shortest * (1 + self._gain) if math.isfinite(self._gain) else math.inf
        promising = {o: s for o, s in self._estimates.items() if s <= most}
        local = LocalSearch(self.problem, self.judge)
        best = local.run(promising)
        if best is not None and self._gain > _NOTHING and self._is_worth_more(best[1]):
            self._explore(best[0], local.seen)

    def _look_further(self) -> None:
        """More layouts: from all cuts and device orders, and uphill from the best."""
        for place, count in enumerate(self._best_counts()):
            if self._is_hopeless(count):
                continue
            everywhere = place < _IN_EVERY_ORDER or self.problem.speeds_differ
            self._look_closely(count, everywhere)
            self._simulate_best()
        for layout in self._on_different_devices(self._ranked(), _CLIMBED):
            if self._estimates[layout] <= self._shortest:
                self._estimate(climb(self.problem, layout))

    def _is_worth_more(self, best: Layout) -> bool:
        """Whether a plan is one of very many like it: a pipeline that is long, yet can be looked at."""
        size = self.problem.num_layers * self.problem.num_devices
        few = self.problem.num_devices <= _FEW_DEVICES
        return few and size > _SMALL and _LONG[0] <= best.num_stages <= _LONG[1]

    def _explore(self, best: float, seen: set[Layout]) -> None:
        """From the best of each length and M uphill; from the best for an M, the best around first.

        Args:
            best: the shortest simulated step so far.
            seen: layouts whose surroundings were simulated.
        """
        ranked, before = self._ranked(), set(self._estimates)
        firsts: dict[tuple[int, int], Layout] = {}
        for layout in ranked:
            firsts.setdefault((layout.num_stages, layout.micro_batches), layout)
        around: list[Iterable[Layout]] = []
        for count in self._best_counts()[:_EXPLORED]:
            alike = (layout for layout in ranked if layout.micro_batches == count)
            around.append(best_first(self.problem, self._on_different_devices(alike, _CLIMBED)))
        starts = list(firsts.values())[:_UPHILL]
        for ways in (around, (uphill(self.problem, layout) for layout in starts)):
            self._estimate(itertools.chain.from_iterable(ways))
            new = {o: s for o, s in self._estimates.items() if o not in before and s < best}
            before.update(self._estimates)
            found = LocalSearch(self.problem, self.judge, seen).run(new)
            best = min(best, found[0]) if found else best

    def _scout(self) -> None:
        """Every M that can be good, those that look good first."""
        problem, everything = self.problem, tuple(range(self.problem.num_devices))
        for count in problem.micro_batch_counts:
            self._estimate([Layout((0, problem.num_layers), (everything,), count)])
        for count in sorted(problem.micro_batch_counts, key=self._fill_and_work):
            if not self._is_hopeless(count):
                self._scout_count(count)
                self._simulate_best()

    def _is_hopeless(self, count: int) -> bool:
        """No plan with this M is faster than one that was simulated: it is not worth a look."""
        if self.prospects is None or math.isinf(self._shortest):
            return False
        return not self.prospects.allow(count, self._shortest * (1 - 1e-9))

    def _simulate_best(self) -> None:
        """Simulate the best estimate so far, so that other M can be found hopeless.

        The estimate of two policies is often the same, while one waits for its transfers.
        """
        if self.prospects is None or not self._estimates:
            return
        least = min(self._estimates.values()) * (1 + 1e-9)
        best = [layout for layout, seconds in self._estimates.items() if seconds <= least]
        for layout in sorted(best)[:_ALIKE]:
            seconds = self.judge.seconds(layout)
            if seconds is not None:
                self._shortest = min(self._shortest, seconds)

    def _find_gain(self) -> None:
        """What the shortest step so far may be longer than the best, relatively: effort is for that."""
        size = self.problem.num_layers * self.problem.num_devices
        if size <= _SMALL or self.prospects is None or math.isinf(self._shortest):
            return
        self._simulate_best()
        bound = lower_bound(self.problem, self._shortest, self._best_counts()[0], self.prospects)
        self._gain = self._shortest / bound - 1 if bound else math.inf

    def _fill_and_work(self, count: int) -> float:
        """About how long a step must take: the work spread over all devices, and a part of it."""
        tables = self.problem.tables(count)
        forward, backward = tables.layers.layer_seconds(tables.first_rows)
        return float(forward[-1] + backward[-1]) * (count / self.problem.num_devices + _FILL)

    @property
    def _limit(self) -> float:
        return min(self._estimates.values(), default=np.inf) * min(_LIMIT, 1 + self._gain)

    def _split_in_two(self) -> None:
        """Two stages on all devices, in every ratio: a few devices behind many are easily missed."""
        problem, devices = self.problem, self.problem.num_devices
        if problem.num_layers == 1 or not 1 < devices <= _FEW_DEVICES:
            return
        middle = (0, problem.num_layers // 2, problem.num_layers)
        order = device_orders(problem.cluster)[0]
        for count in self._best_counts():
            layouts = [
                Layout(middle, pack(order, (first, devices - first)), count)
                for first in range(1, devices)
            ]
            policies = problem.policies(layouts[0])
            best = sorted(better_cuts_of_all(problem, layouts, policies, _SPLIT_ROUNDS))
            self._estimate(layout for seconds, layout in best[:_POLISHED] if np.isfinite(seconds))

    def _good_counts(self) -> set[int]:
        """The M whose best estimate is not far from the best of all."""
        best = min(self._estimates.values(), default=0.0) * _GOOD
        return {layout.micro_batches for layout, s in self._estimates.items() if s <= best}

    def _scout_count(self, count: int) -> None:
        orders = device_orders(self.problem.cluster)
        marks = choose_marks(self.problem.tables(count), self._most_marks(_SCOUT_MARKS))
        # Whether slow devices come first or last can decide which M are good.
        for order in orders if self.problem.speeds_differ else orders[:1]:
            grid = self._grid(self._frame(order, count), count, marks, 1)
            self._polish(self._try(grid, _SCOUT_VALUES), roughly=True)

    def _grid(self, frame: Frame, count: int, marks: Ints, in_flight: int) -> Grid:
        key = frame.order, count, len(marks), in_flight
        found = self._grids.get(key)
        if found is None:
            found = make_grid(self.problem, frame, count, marks, in_flight)
            self._grids[key] = found
        return found

    def _try(self, grid: Grid, values: int) -> list[Layout]:
        """What the dynamic programme finds."""
        # Under policy B a stage may run ahead of its transfers.
        attachments = (False, True) if self.problem.warmup == "A" else (False,)
        found = [
            layout
            for attached in attachments
            for layout in trade_off(grid, self._limit, attached, values)
        ]
        self._estimate(found)
        return found

    def _polish(self, found: Iterable[Layout], roughly: bool = False) -> None:
        """Better cuts for the best on different devices; roughly: one at a time, in a few rounds."""
        problem = self.problem
        variants = {variant for layout in found for variant in problem.variants(layout)}
        known = sorted((self._estimates[v], v) for v in variants if v in self._estimates)
        best = self._on_different_devices((layout for _, layout in known), _POLISHED)
        best = [layout for layout in best if layout.num_stages > 1]
        if roughly and best:
            policies = problem.policies(best[0])
            better = better_cuts_of_all(problem, best, policies, _ROUGH_ROUNDS)
        else:
            better = [better_cuts(problem, layout, problem.policies(layout)) for layout in best]
        self._estimate(layout for _, layout in better)

    def _on_different_devices(self, ranked: Iterable[Layout], most: int) -> list[Layout]:
        firsts: dict[tuple[Devices, ...], Layout] = {}
        for layout in ranked:
            firsts.setdefault(layout.devices, layout)
        return list(firsts.values())[:most]

    def _most_marks(self, usual: int) -> int:
        """How many cuts to look at."""
        small = self.problem.num_devices <= _FEW_DEVICES
        return _ALL_MARKS if small and self.problem.num_layers <= _ALL_MARKS else usual

    def _look_closely(self, count: int, every_order: bool) -> None:
        marks = choose_marks(self.problem.tables(count), self._most_marks(_MARKS))
        orders = device_orders(self.problem.cluster)
        for number, order in enumerate(orders if every_order else orders[:1]):
            frame = self._frame(order, count)
            for in_flight in _IN_FLIGHT:
                grid = self._grid(frame, count, marks, in_flight)
                found = self._try(grid, _VALUES)
                self._polish(found)
                for option in grid.options if number == 0 and in_flight == 1 else ():
                    if frame.widths[option] in _EQUAL:
                        equal = replace(grid, options=np.array([option]))
                        self._try(equal, _SCOUT_VALUES)
                if not any(self._is_short_of_memory(layout) for layout in found):
                    break

    def _is_short_of_memory(self, layout: Layout) -> bool:
        counts = self.problem.guess_warmup(layout)
        wanted = warmup_counts(layout.num_stages, layout.micro_batches)
        return counts is None or any(k < w for k, w in zip(counts, wanted, strict=True))

    def _frame(self, order: Devices, count: int) -> Frame:
        problem, rows = self.problem, self.problem.tables(count).first_rows
        reach = min(len(order), rows * problem.num_layers)
        key = order, reach, choose_step(reach, rows)
        found = self._frames.get(key)
        if found is None:
            found = make_frame(problem.cluster, problem.symmetry, order[:reach], key[2])
            self._frames[key] = found
        return found

    def _best_counts(self) -> list[int]:
        good = self._good_counts()
        counts = dict.fromkeys(layout.micro_batches for layout in self._ranked())
        return [count for count in counts if count in good][:_BEST_COUNTS]

    def _ranked(self) -> list[Layout]:
        ranked = sorted(self._estimates.items(), key=lambda item: (item[1], item[0]))
        return [layout for layout, _ in ranked]

    def _estimate(self, layouts: Iterable[Layout]) -> None:
        for layout in layouts:
            for variant in self.problem.variants(layout):
                seconds = (
                    None if variant in self._estimates else guess_seconds(self.problem, variant)
                )
                if seconds is not None:
                    self._estimates[variant] = seconds
