"""What the first replica of a stage does at least, for every M of a range at once.

The first replica has the most rows. For M micro-batches of R rows and r replicas these are
x = ceil(R / r) of each, so the same x and r stand for many M: a range of M is described by a few
pairs (r, x), and the work of a pair is at least that of its fewest micro-batches, and at least that
of its share of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dapple.planner.problem import Problem
from dapple.planner.tables import CostTables
from dapple.planner.traffic import Floats


@dataclass(frozen=True)
class Share:
    """The first of some number of replicas; prefix sums over layers, shape (N + 1,), seconds.

    Attributes:
        width, most_width: least and most replicas that this share stands for.
        units: what they take of the cluster's at least (`Units`; one each where speeds are equal).
        held_rows: least rows of the largest micro-batch on the replica that has most.
        first_rows, last_rows: least rows that the replica of one stage sends that of the next, of
            the first and of the last micro-batch.
        forward: of the first micro-batch.
        backward: of the last micro-batch.
        work: of the whole step.
        last_backward: of the last micro-batch at most.
    """

    width: int
    most_width: int
    units: int
    held_rows: int
    first_rows: int
    last_rows: int
    forward: Floats
    backward: Floats
    work: Floats
    last_backward: Floats


def shares(problem: Problem, low: int, high: int, most: int) -> list[Share]:
    """The shares that any plan with low <= M <= high gives to first replicas.

    Args:
        problem: what is planned.
        low, high: range of M.
        most: about so many are told apart.
    """
    if low == high:
        return merged(_single_shares(problem, low), most)
    batch, tables = problem.global_batch_size, problem.tables(high)
    fewest, largest = -(-batch // high), -(-batch // low)
    found: list[Share] = []
    done: set[int] = set()
    for width in range(1, problem.num_devices + 1):
        for rows in range(-(-fewest // width), -(-largest // width) + 1):
            if rows in done:
                continue
            if batch <= low * rows * width:
                done.add(rows)  # More replicas with as many rows do no less work.
            found.append(_range_share(tables, batch, low, width, rows))
    return merged(found, most)


def _single_shares(problem: Problem, micro_batches: int) -> list[Share]:
    tables = problem.tables(micro_batches)
    num_last = micro_batches - tables.num_first
    found: list[Share] = []
    for width in range(1, problem.num_devices + 1):
        first, last = -(-tables.first_rows // width), -(-tables.last_rows // width)
        if found and found[-1].first_rows == first and found[-1].last_rows == last:
            continue
        forward, backward = tables.layer_seconds(first)
        forward_last, backward_last = tables.layer_seconds(last)
        work = tables.num_first * (forward + backward) + num_last * (forward_last + backward_last)
        found.append(
            Share(
                width=width,
                most_width=width,
                units=width,
                held_rows=first,
                first_rows=first,
                last_rows=last,
                forward=forward,
                backward=backward_last,
                work=work,
                last_backward=backward_last,
            )
        )
    return found


def _range_share(tables: CostTables, batch: int, low: int, width: int, rows: int) -> Share:
    # Micro-batches differ by one row, so the first replica has `rows` or one less.
    others = sorted({rows, max(1, rows - 1)})
    seconds = {n: [np.diff(prefix) for prefix in tables.layer_seconds(n)] for n in others}
    both = {n: forward + backward for n, (forward, backward) in seconds.items()}
    fewest = low * np.minimum.reduce([both[n] for n in others])
    share = batch / width * np.minimum.reduce([both[n] / n for n in others])
    return Share(
        width=width,
        most_width=width,
        units=width,
        held_rows=rows,
        first_rows=rows,
        last_rows=others[0],
        forward=prefix_sums(seconds[rows][0]),
        backward=prefix_sums(np.minimum.reduce([seconds[n][1] for n in others])),
        work=prefix_sums(np.maximum(fewest, share)),
        last_backward=prefix_sums(np.maximum.reduce([seconds[n][1] for n in others])),
    )


def merged(found: Sequence[Share], most: int) -> list[Share]:
    """Shares of one width, and then neighbours in width, as one that does no more than any.

    At most about `most` are left.
    """
    ordered = sorted(found, key=lambda share: (share.units, share.first_rows))
    if len(ordered) > most:
        widths = itertools.groupby(ordered, key=lambda share: share.units)
        ordered = [_least(list(group)) for _, group in widths]
    size = -(-len(ordered) // most)
    return [_least(ordered[n : n + size]) for n in range(0, len(ordered), size)]


def _least(group: Sequence[Share]) -> Share:
    if len(group) == 1:
        return group[0]

    def layers(prefixes: list[Floats]) -> Floats:
        return prefix_sums(np.minimum.reduce([np.diff(prefix) for prefix in prefixes]))

    return Share(
        width=min(share.width for share in group),
        most_width=max(share.most_width for share in group),
        units=min(share.units for share in group),
        held_rows=min(share.held_rows for share in group),
        first_rows=min(share.first_rows for share in group),
        last_rows=min(share.last_rows for share in group),
        forward=layers([share.forward for share in group]),
        backward=layers([share.backward for share in group]),
        work=layers([share.work for share in group]),
        last_backward=prefix_sums(
            np.maximum.reduce([np.diff(share.last_backward) for share in group])
        ),
    )


def prefix_sums(values: Floats) -> Floats:
    """Sums of the first 0, 1, 2, ... values."""
    return np.concatenate([[0.0], np.cumsum(values)])
