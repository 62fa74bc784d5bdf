"""How long a micro-batch takes at least because replicas have whole rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats

_MOST_ROWS = 24
"""Beyond so many rows of one replica, whole rows are not told from others."""


def least_times(devices: Mapping[int, int], rows: int) -> Floats:
    """The least of max n / q over all replicas, of q units of speed and n whole rows each.

    Where every replica has n <= T q rows, the stage has sum floor(T q) of them at most. So T is at
    least the first for which some devices, with so many units together, reach all rows.

    Args:
        devices: how many there are of each number of units.
        rows: of the micro-batch.

    Returns:
        Shape (units of the cluster + 1,), by the units of the stage; infinite for none.

    >>> least_times({2: 1, 1: 1}, 4).tolist()  # 2 and 1 units: 3 rows and 1
    [inf, 4.0, 2.0, 1.5]
    """
    total = sum(units * count for units, count in devices.items())
    with np.errstate(divide="ignore"):
        found: Floats = rows / np.arange(total + 1)
    waiting = np.ones(total + 1, dtype=np.bool_)
    rates = {n / units: (n, units) for units in devices for n in range(1, _MOST_ROWS + 1)}
    for seconds, (n, units) in sorted(rates.items()):
        if seconds > _MOST_ROWS / max(devices) or not waiting[1:].any():
            break
        each = {other: n * other // units for other in devices}
        found[waiting] = np.maximum(found[waiting], seconds)
        waiting &= _most_rows(devices, each, total) < rows
    return found


def _most_rows(devices: Mapping[int, int], each: Mapping[int, int], total: int) -> Ints:
    """By units, the most rows of devices that together have no more; a knapsack."""
    most = np.zeros(total + 1, dtype=np.int64)
    for units, count in devices.items():
        left, some = count, 1
        while left:
            taken = min(some, left)
            weight, value = taken * units, taken * each[units]
            most[weight:] = np.maximum(most[weight:], most[: total + 1 - weight] + value)
            left, some = left - taken, 2 * some
    return most
