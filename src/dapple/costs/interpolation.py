"""What was measured at a few batch sizes, at any number of rows."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def seconds_at(sizes: Sequence[int], values: Sequence[float], rows: float) -> float:
    """A time at `rows`, from times measured at ascending batch sizes.

    Linear between sizes. Below the smallest size, its time: halving a batch of one saves
    nothing. Above the largest, proportional to its time: the slope of the last segment would be
    the difference of two measurements, which noise can turn into work for free. No rows take no
    time.
    """
    if rows <= 0:
        return 0.0
    if len(sizes) > 1 and rows <= sizes[0]:
        return values[0]
    if len(sizes) == 1 or rows >= sizes[-1]:
        return values[-1] * (rows / sizes[-1])
    return _on_segment(sizes, values, rows)


def bytes_at(sizes: Sequence[int], values: Sequence[float], rows: float) -> float:
    """A size in bytes at `rows`; like `seconds_at`, but bytes shrink below the smallest size."""
    if rows <= 0:
        return 0.0
    if len(sizes) == 1:
        return values[0] * (rows / sizes[0])
    return max(0.0, _on_segment(sizes, values, rows))


def _on_segment(sizes: Sequence[int], values: Sequence[float], rows: float) -> float:
    right = min(max(bisect.bisect_left(sizes, rows), 1), len(sizes) - 1)
    left = right - 1
    if rows == sizes[right]:
        return values[right]
    weight = (rows - sizes[left]) / (sizes[right] - sizes[left])
    return values[left] + (values[right] - values[left]) * weight
