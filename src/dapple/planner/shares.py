"""What the first replica of a stage does at least, by number of micro-batches and of replicas.

This is where devices are equally fast; see `mixed` for others.

The first replica has the most rows. Of a micro-batch of R rows, r replicas give it ceil(R / r), so
few different shares stand for all r; and the M for which the largest and the smallest micro-batch
have the same rows stand together, since work is linear in M between the least and the greatest of
them. About 2 sqrt(batch) such ranges hold all M.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dapple.planner.problem import Problem
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats
from dapple.records import MOST_MICRO_BATCHES


@dataclass(frozen=True)
class Shares:
    """The first of some number of replicas, for all M of a range. R shares of N layers.

    Seconds are those of a device of speed 1.

    Attributes:
        low, high: range of M.
        widths, most_widths: shape (R,), least and most replicas that a share stands for.
        units: shape (R,), what they take of the cluster's at least (`dapple.planner.mixed`; one
            each where speeds are equal).
        held_rows: shape (R,), least rows of the largest micro-batch on the replica that has most.
        first_rows, last_rows: shape (R,), least rows that the replica of one stage sends that of
            the next, of the first and of the last micro-batch.
        forward: shape (R, N), seconds of the first micro-batch.
        backward: shape (R, N), of the last micro-batch.
        last_backward: shape (R, N), of the last micro-batch at most.
        trip: shape (R, N), F + B of whichever micro-batch takes less.
        work: shape (R, N), of the whole step.
    """

    low: int
    high: int
    widths: Ints
    most_widths: Ints
    units: Ints
    held_rows: Ints
    first_rows: Ints
    last_rows: Ints
    forward: Floats
    backward: Floats
    last_backward: Floats
    trip: Floats
    work: Floats


def row_ranges(batch: int) -> list[tuple[int, int]]:
    """Ranges of M, together 1..batch, in which micro-batches have the same one or two sizes.

    >>> row_ranges(7)
    [(1, 1), (2, 2), (3, 3), (4, 6), (7, 7)]
    """
    ranges = []
    low, most = 1, min(batch, MOST_MICRO_BATCHES)
    while low <= most:
        high = low if batch % low == 0 else min(batch // (batch // low), most)
        if high > low and batch % high == 0:
            high -= 1
        ranges.append((low, high))
        low = high + 1
    return ranges


def shares(problem: Problem, low: int, high: int) -> Shares:
    """The shares that any plan with low <= M <= high, one of `row_ranges`, gives to first replicas."""
    batch, tables = problem.global_batch_size, problem.layer_tables
    most, least = -(-batch // low), batch // low
    widths = _widths(problem.num_devices, most, least)
    first, last = -(-most // widths), -(-least // widths)
    rows = {n: [np.diff(part) for part in tables.layer_seconds(n)] for n in {*first, *last}}
    forward, backward = (np.array([rows[n][part] for n in first]) for part in range(2))
    forward_last, backward_last = (np.array([rows[n][part] for n in last]) for part in range(2))
    trip = forward_last + backward_last
    larger = [batch - count * least if most > least else count for count in (low, high)]
    work = np.minimum(
        *(
            more * (forward + backward) + (count - more) * trip
            for count, more in zip((low, high), larger, strict=True)
        )
    )
    return Shares(
        low=low,
        high=high,
        widths=widths,
        most_widths=np.append(widths[1:] - 1, problem.num_devices),
        units=widths,
        held_rows=first,
        first_rows=first,
        last_rows=last,
        forward=forward,
        backward=backward_last,
        last_backward=backward_last,
        # Measured times need not grow with the rows.
        trip=np.minimum(trip, forward + backward),
        work=work,
    )


def _widths(devices: int, most: int, least: int) -> Ints:
    """Replica counts from which on the first replica has other rows of both sizes."""
    counts = np.arange(1, devices + 1)
    first, last = -(-most // counts), -(-least // counts)
    other = (np.diff(first, prepend=0) != 0) | (np.diff(last, prepend=0) != 0)
    widths: Ints = counts[other]
    return widths
