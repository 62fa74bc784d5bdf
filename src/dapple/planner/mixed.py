"""What some replica of a stage does at least where devices differ in speed.

Speeds are counted in units, each device's rounded up, so that a stage takes some units of the
cluster's. Of its replicas, whichever way the rows are split, one has at least its share by speed, v
of V units and of all rows; and one, perhaps another, of every micro-batch what whole rows leave it
(`whole_rows`). Other replicas, on the way of a micro-batch, have at least the whole rows of an even
split or of one in proportion to speed, the two that a search looks at.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dapple.planner.distinct import distinct
from dapple.planner.layers import all_at
from dapple.planner.problem import Problem
from dapple.planner.shares import Shares, row_ranges, shares
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats
from dapple.planner.whole_rows import least_times
from dapple.records import MOST_MICRO_BATCHES

_FINEST = 8
"""Most units of the fastest device."""
_LEVELS = 96
"""About so many sizes of stages are told apart, half of them small ones."""
_WIDE = 1.06
"""The greatest M of a range over the least."""
_POINTS = 24
"""About so many numbers of rows are looked at for one of them."""


@dataclass(frozen=True)
class Units:
    """Speeds in units.

    Attributes:
        size: the speed of one unit.
        of_device: per device its units, its speed rounded up.
    """

    size: float
    of_device: tuple[int, ...]

    @property
    def total(self) -> int:
        """Those of the cluster."""
        return sum(self.of_device)


@functools.lru_cache(maxsize=8)
def speed_units(speeds: tuple[float, ...]) -> Units:
    """The units that make devices least faster than they are.

    >>> speed_units((1.0, 1.0, 0.5)).of_device
    (2, 2, 1)
    """
    fastest = max(speeds)
    choices = []
    for parts in range(1, _FINEST + 1):
        counts = tuple(max(1, math.ceil(v / fastest * parts - 1e-9)) for v in speeds)
        choices.append((sum(counts) / parts, parts, counts))
    _, parts, counts = min(choices)
    return Units(fastest / parts, counts)


def units_of(problem: Problem) -> Units:
    """The units of the cluster's devices; one each where all are equally fast."""
    return speed_units(problem.speeds)


def all_shares(problem: Problem, low: int, high: int) -> Shares:
    """The shares that any plan with low <= M <= high, one of `ranges`, gives to its replicas.

    Args:
        problem: what is planned.
        low, high: range of M.
    """
    if not problem.speeds_differ:
        return shares(problem, low, high)
    speeds, units = problem.speeds, units_of(problem)
    times, kinds = _Times(problem), sorted(set(zip(speeds, units.of_device, strict=True)))
    soonest = least_times(Counter(units.of_device), -(-problem.global_batch_size // high))
    found = [
        _share(problem, times, kinds, (units.size, least, top, soonest[top]), (low, high))
        for least, top in _levels(units.total)
        if top >= min(units.of_device)
    ]
    return _packed(found, low, high)


def ranges(problem: Problem) -> list[tuple[int, int]]:
    """Ranges of M that are looked at together; all that `Problem` allows are in one of them."""
    batch, size = problem.global_batch_size, problem.micro_batch_size
    if size is not None:
        (count,) = problem.micro_batch_counts
        return [(count, count)]
    if not problem.speeds_differ:
        return row_ranges(batch)
    wide, low = [], 1
    while low <= min(batch, MOST_MICRO_BATCHES):
        high = min(batch, int(low * _WIDE))
        wide.append((low, high))
        low = high + 1
    return wide


def _levels(total: int) -> Iterator[tuple[int, int]]:
    """Ranges of units that together are 1..total: of one, or on large clusters ever wider."""
    ends = np.arange(1, total + 1)
    if total > _LEVELS:
        few = _LEVELS // 2
        ends = distinct([*ends[:few], *np.geomspace(few, total, few).round().astype(int)])
    before = 0
    for end in ends.tolist():
        yield before + 1, end
        before = end


@dataclass(frozen=True)
class _Share:
    """As one of `Shares`; seconds of shape (N,), on the fastest device."""

    width: int
    most_width: int
    units: int
    held_rows: int
    forward: Floats
    backward: Floats
    work: Floats
    last_backward: Floats


def _packed(found: Sequence[_Share], low: int, high: int) -> Shares:
    """As arrays. Replicas that exchange rows at all exchange one of them."""
    forward, backward = (
        np.array(parts) for parts in zip(*((s.forward, s.backward) for s in found), strict=True)
    )
    one = np.ones(len(found), dtype=np.int64)
    return Shares(
        low=low,
        high=high,
        widths=np.array([share.width for share in found]),
        most_widths=np.array([share.most_width for share in found]),
        units=np.array([share.units for share in found]),
        held_rows=np.array([share.held_rows for share in found]),
        first_rows=one,
        last_rows=one,
        forward=forward,
        backward=backward,
        last_backward=np.array([share.last_backward for share in found]),
        trip=forward + backward,
        work=np.array([share.work for share in found]),
    )


class _Times:
    """Seconds of every layer at some rows, on a device of speed 1; never fewer for more rows."""

    def __init__(self, problem: Problem) -> None:
        layers = problem.profile.layers
        self._sizes = problem.profile.batch_sizes
        measured = (
            np.array([layer.forward_seconds for layer in layers]),
            np.array([layer.backward_seconds for layer in layers]),
        )
        # A smaller batch that took longer than a larger one: the shorter time holds for both.
        self._least = [np.minimum.accumulate(v[:, ::-1], axis=1)[:, ::-1] for v in measured]
        self._ways: dict[int, tuple[Floats, Floats]] = {}

    def ways(self, rows: int) -> tuple[Floats, Floats]:
        """Forward and backward, shape (N,) each."""
        found = self._ways.get(rows)
        if found is None:
            forward, backward = (all_at(self._sizes, values, rows) for values in self._least)
            found = self._ways[rows] = forward, backward
        return found

    def both(self, rows: int) -> Floats:
        """Their sum."""
        forward, backward = self.ways(rows)
        return forward + backward

    def points(self, low: int, high: int) -> Ints:
        """Numbers of rows from low to high: all, or some, with those that were measured."""
        if high - low < _POINTS:
            return np.arange(low, high + 1)
        grown = np.geomspace(low, high, _POINTS).round().astype(int)
        inner = [size for size in self._sizes if low < size < high]
        return distinct([*grown, *inner])


def _share(
    problem: Problem,
    times: _Times,
    kinds: list[tuple[float, int]],
    level: tuple[float, int, int, float],
    counts: tuple[int, int],
) -> _Share:
    """The share of a stage that takes `least` to `most` units.

    Args:
        problem: what is planned.
        times: of the layers.
        kinds: speeds and units of devices.
        level: speed of a unit, least and most of them, and the least rows per unit on some replica.
        counts: least and most M.
    """
    (size, least, most, soonest), (low, high), batch = level, counts, problem.global_batch_size
    slowest, fastest = min(n for _, n in kinds), max(n for _, n in kinds)
    uneven = int(low != high or batch % low > 0)
    first_rows = -(-batch // high)
    forward, backward = (np.full(problem.num_layers, np.inf) for _ in range(2))
    # One replica has its share of all rows, and one, perhaps another, its whole rows of each micro-batch.
    busiest = [[np.full(problem.num_layers, np.inf), np.zeros(problem.num_layers)] for _ in "ab"]
    for speed, own in kinds:
        if own > most:
            continue
        whole = max(1, math.ceil(soonest * own - 1e-9))
        both_ways = (
            _least_work(times, batch * own / most, batch, counts),
            (_of_micro_batches(times, whole, batch, counts), whole),
        )
        for found, (work, until) in zip(busiest, both_ways, strict=True):
            found[0] = np.minimum(found[0], work / (own * size))
            found[1] = np.maximum(found[1], times.ways(until)[1] / (own * size))
        in_proportion = int(first_rows * speed / (most * size) * (1 - 1e-9)) - uneven
        evenly = batch // high // (1 + (most - own) // slowest)
        ways = times.ways(max(1, min(in_proportion, evenly)))
        forward = np.minimum(forward, ways[0] / speed)
        backward = np.minimum(backward, ways[1] / speed)
    work, last_backward = max(busiest, key=lambda found: float(found[0].sum()))
    quickest = max(speed for speed, _ in kinds)
    width, most_width = -(-least // fastest), min(problem.num_devices, max(1, most // slowest))
    return _Share(
        width=width,
        most_width=most_width,
        units=least,
        held_rows=-(-first_rows // most_width),
        forward=forward * quickest,
        backward=backward * quickest,
        work=work * quickest,
        last_backward=last_backward * quickest,
    )


def _least_work(
    times: _Times, rows: float, batch: int, counts: tuple[int, int]
) -> tuple[Floats, int]:
    """A replica's least seconds for so many rows of the step, per layer, at speed 1.

    With n rows of the first micro-batch it has n or, of smaller ones, n - 1 of each. So its work is
    that of M micro-batches of at least n - 1 rows, and that of all its rows at the best rate.

    Returns:
        Shape (N,), and the rows of a micro-batch beyond which its work without the last
        backward is more than that.
    """
    low, high = counts
    smaller = int(low != high or batch % low > 0)
    begin, until = max(1, math.ceil(rows / high - 1e-9)), max(1, math.ceil(rows / low - 1e-9))
    points = times.points(begin, until + 1)
    least = low * times.both(until)
    for here, after in zip(points, [*points[1:], points[-1] + 1], strict=True):
        fewer = int(here) - smaller
        of_batches = _of_micro_batches(times, int(here), batch, counts)
        ends = {n for n in (fewer, int(here), int(after) - 1) if n > 0}
        at_best = np.minimum.reduce([times.both(n) / n for n in ends])
        least = np.minimum(least, np.maximum(of_batches, rows * at_best))
    return least, until


def _of_micro_batches(times: _Times, rows: int, batch: int, counts: tuple[int, int]) -> Floats:
    """Seconds of a replica with so many rows of the first micro-batch and at most one less of others."""
    low, high = counts
    smaller = int(low != high or batch % low > 0)
    first = batch % low if low == high else 0
    seconds: Floats = (low - first) * times.both(rows - smaller) + first * times.both(rows)
    return seconds
