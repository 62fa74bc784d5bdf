"""Cutting a row of costs into parts so that the largest is smallest."""

from __future__ import annotations

import numpy as np


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
    choices: list[list[int]] = []
    for part in range(1, parts + 1):
        after = np.full(count + 1, np.inf)
        choice = [0] * (count + 1)
        for stop in range(part, count - (parts - part) + 1):
            worst = np.maximum(best[part - 1 : stop], prefix[stop] - prefix[part - 1 : stop])
            start = int(np.argmin(worst))
            choice[stop], after[stop] = start + part - 1, worst[start]
        choices.append(choice)
        best = after
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(reversed(bounds))
