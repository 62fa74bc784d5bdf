"""Cutting a row of costs into parts so that the largest is smallest."""

from __future__ import annotations

import numpy as np

_AT_ONCE = 256
"""Ends of a part that are looked at together; bounds the memory."""


def balanced_bounds(costs: list[float], parts: int) -> tuple[int, ...]:
    """Cut costs into contiguous parts, none empty, so that the largest sum is smallest.

    Args:
        costs: cost of each layer, >= 0.
        parts: 1 <= parts <= len(costs).

    Returns:
        parts + 1 layer numbers from 0 to len(costs).

    >>> balanced_bounds([1.0, 1.0, 1.0, 3.0], 2)
    (0, 3, 4)
    """
    count = len(costs)
    prefix = np.concatenate([[0.0], np.cumsum(costs)])
    best = np.concatenate([[0.0], np.full(count, np.inf)])
    choices = []
    for part in range(1, parts + 1):
        after = np.full(count + 1, np.inf)
        choice = np.zeros(count + 1, dtype=np.int64)
        for first in range(part, count - (parts - part) + 1, _AT_ONCE):
            stops = np.arange(first, min(first + _AT_ONCE, count - (parts - part) + 1))
            starts = np.arange(part - 1, stops[-1])
            worst = np.maximum(best[starts], prefix[stops][:, None] - prefix[starts])
            worst[starts >= stops[:, None]] = np.inf
            least = worst.argmin(axis=1)
            choice[stops] = starts[least]
            after[stops] = worst[np.arange(len(stops)), least]
        choices.append(choice)
        best = after
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return tuple(reversed(bounds))
