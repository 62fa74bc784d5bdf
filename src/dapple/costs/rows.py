"""Who works on which rows: docs/semantics.md, section "Rows"."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from dapple.errors import PlanError

_BELOW = 1 - 1e-12
"""Rounding must not give a replica more than its exact share."""


def split_rows(rows: int, parts: int, shares: Sequence[float] | None = None) -> tuple[int, ...]:
    """Cut rows into contiguous parts, like `torch.tensor_split`: the first get one row more.

    With shares, part k ends at the row nearest to its cumulative share.

    >>> split_rows(7, 3), split_rows(2, 3), split_rows(8, 2, (3.0, 1.0))
    ((3, 2, 2), (1, 1, 0), (6, 2))

    Raises:
        PlanError: a share is negative, or all are zero.
    """
    if shares is None:
        base, extra = divmod(rows, parts)
        return (base + 1,) * extra + (base,) * (parts - extra)
    total = sum(shares)
    if min(shares) < 0 or total <= 0:
        raise PlanError(
            f"rows {list(shares)} cannot be shares of replicas; use numbers that are not negative, "
            "one of them above zero, or leave rows out for an even split"
        )
    ends = [int(rows * part / total + 0.5) for part in itertools.accumulate(shares)]
    ends[-1] = rows
    return tuple(end - start for start, end in itertools.pairwise([0, *ends]))


def proportional_rows(rows: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Rows for replicas of these speeds, in proportion to them, so that the last one ends soonest.

    No replica has fewer rows than its exact share, rounded down; the rest goes, row by row, to
    whoever is done with it first.

    >>> proportional_rows(8, (2.0, 1.0)), proportional_rows(2, (1.0, 1.0, 0.25))
    ((5, 3), (1, 1, 0))
    """
    total = sum(speeds)
    counts = [int(rows * speed / total * _BELOW) for speed in speeds]
    ready = [((count + 1) / speeds[k], k) for k, count in enumerate(counts)]
    heapq.heapify(ready)
    for _ in range(rows - sum(counts)):
        _, k = ready[0]
        counts[k] += 1
        heapq.heapreplace(ready, ((counts[k] + 1) / speeds[k], k))
    return tuple(counts)


def overlaps(senders: Sequence[int], receivers: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Who sends how many rows to whom: (sender replica, receiver replica, rows).

    Both sides hold contiguous ranges of the same rows, so at most r1 + r2 - 1 pairs overlap.

    >>> overlaps((2, 2, 2), (3, 3))
    ((0, 0, 2), (1, 0, 1), (1, 1, 1), (2, 1, 2))
    """
    pairs: list[tuple[int, int, int]] = []
    remaining = iter(enumerate(receivers))
    receiver, wanted = next(remaining, (0, 0))
    for sender, rows in enumerate(senders):
        while rows:
            if wanted:
                count = rows if rows < wanted else wanted
                pairs.append((sender, receiver, count))
                rows -= count
                wanted -= count
            else:
                receiver, wanted = next(remaining)
    return tuple(pairs)
