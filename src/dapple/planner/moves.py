"""Layouts of one length and M by number, and which moves of their cuts can be of use at all.

A move of a cut changes the two stages beside it and the transfer between them:

    stage      0   0>1   1   1>2   2   2>3   3
               as before |  changed  | later, or sooner

so what the other stages' work takes after it follows from sums and largest figures before and
behind, and most moves are done with by that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dapple.planner.bank import Bank
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats


@dataclass(frozen=True)
class Places:
    """Where some layouts of S stages each find their costs.

    Attributes:
        bank: of their M.
        count: M.
        shared: whether replicas share out their update.
        stage: shape (S, L), numbers of the stages of L layouts.
        link: shape (S - 1, L), numbers of the transfers.
    """

    bank: Bank
    count: int
    shared: bool
    stage: Ints
    link: Ints

    @classmethod
    def of(cls, problem: Problem, layouts: Sequence[Layout]) -> Places:
        """Those of some layouts of the same length and M."""
        one = layouts[0]
        bank = problem.bank(one.micro_batches)
        pairs = [itertools.pairwise(layout.devices) for layout in layouts]
        stages = [[bank.stage(devices) for devices in layout.devices] for layout in layouts]
        links = [[bank.link(*pair) for pair in row] for row in pairs]
        return cls(
            bank=bank,
            count=one.micro_batches,
            shared=one.shard,
            stage=np.array(stages).T,
            link=np.array(links, dtype=np.int64).T,
        )

    def seconds(self, stage: Ints, link: Ints, cuts: Ints) -> Floats:
        """Forward, backward, whole work, and what comes after, of stages and transfers in turn.

        Args:
            stage: shape (s, P), numbers of neighbouring stages.
            link: shape (s - 1, P), numbers of the transfers between them.
            cuts: shape (s + 1, P), layers.

        Returns:
            Shape (4, 2 s - 1, P).
        """
        times = np.zeros((4, 2 * len(stage) - 1, stage.shape[1]))
        times[:, ::2] = self.bank.stage_seconds(stage, cuts[:-1], cuts[1:], self.shared)
        if len(link):
            forward, backward, work, _ = times
            forward[1::2], backward[1::2] = self.bank.link_seconds(link, cuts[1:-1])
            work[1::2] = self.count * np.maximum(forward[1::2], backward[1::2])
        return times


def longest_work(times: Floats) -> tuple[Floats, Floats]:
    """What stages and transfers take without waiting for each other: the estimate without C_s.

    Args:
        times: as `Places.seconds` has them, of all stages.

    Returns:
        What is before and behind each one's work, shape (2 S - 1, P), and the longest of all with
        it, shape (P,).
    """
    forward, backward, work, after = times
    before_f, before_b = (np.cumsum(way, axis=0) - way for way in (forward, backward))
    late = before_f + np.maximum(before_b + after[0], after)
    alone = (forward + backward).sum(axis=0) - before_b + after
    return late, np.maximum((work + late).max(axis=0), alone.max(axis=0))


class Around:
    """`longest_work` of layouts whose cuts are moved a little.

    Args:
        places: of the layouts.
        bounds: shape (L, S + 1), their cuts as they are.
    """

    def __init__(self, places: Places, bounds: Ints) -> None:
        self._places = places
        forward, backward, work, after = places.seconds(places.stage, places.link, bounds.T)
        self._before_f, self._before_b = _before(forward), _before(backward)
        before_f, before_b = self._before_f[:-1], self._before_b[:-1]
        self._first_after = after[0]
        busy = before_f + work + np.maximum(before_b + after[0], after)
        self._busy_before = _most_before(busy)
        self._alone_before = _most_before(after - before_b)
        self._late_behind = _most_behind(before_f + work + before_b)
        self._busy_behind = _most_behind(before_f + work + after)
        self._alone_behind = _most_behind(after - before_b)

    def longest_work(self, which: Ints, bounds: Ints, first: Ints, stages: int) -> Floats:
        """Seconds of P moves.

        Args:
            which: shape (P,), indices of the layouts.
            bounds: shape (P, S + 1), their cuts.
            first: shape (P,), the first of the stages that are changed.
            stages: how many neighbouring ones are.

        Returns:
            Shape (P,).
        """
        places, number = self._places, first + np.arange(stages + 1)[:, None]
        cuts = bounds[np.arange(len(bounds)), number]
        stage, link = places.stage[number[:-1], which], places.link[number[:-2], which]
        forward, backward, work, after = places.seconds(stage, link, cuts)
        begin, end = 2 * first, 2 * (first + stages) - 1
        before_f, before_b = _before(forward), _before(backward)
        before_f += self._before_f[begin, which]
        before_b += self._before_b[begin, which]
        more_f = before_f[-1] - self._before_f[end, which]
        more_b = before_b[-1] - self._before_b[end, which]
        whole = self._before_f[-1, which] + self._before_b[-1, which] + more_f + more_b
        first_after = np.where(first == 0, after[0], self._first_after[which])
        busy = before_f[:-1] + work + np.maximum(before_b[:-1] + first_after, after)
        longest: Floats = np.maximum.reduce(
            [
                self._busy_before[begin, which],
                self._alone_before[begin, which] + whole,
                busy.max(axis=0),
                (after - before_b[:-1]).max(axis=0) + whole,
                self._late_behind[end, which] + more_f + more_b + first_after,
                self._busy_behind[end, which] + more_f,
                self._alone_behind[end, which] + whole - more_b,
            ]
        )
        return longest


def _before(values: Floats) -> Floats:
    """Sums of what is before each place and of all, shape (n, P) -> (n + 1, P)."""
    sums = np.zeros((len(values) + 1, values.shape[1]))
    np.cumsum(values, axis=0, out=sums[1:])
    return sums


def _most_before(values: Floats) -> Floats:
    """The largest before each place, shape (n, P) -> (n + 1, P)."""
    most = np.full((len(values) + 1, values.shape[1]), -np.inf)
    np.maximum.accumulate(values, axis=0, out=most[1:])
    return most


def _most_behind(values: Floats) -> Floats:
    """The largest at each place and behind it, shape (n, P) -> (n + 1, P)."""
    return _most_before(values[::-1])[::-1]
