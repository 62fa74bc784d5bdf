"""A lower bound on the step of many layouts at once, to skip those that cannot win."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dapple.planner.formulas import pipeline_bound
from dapple.planner.tables import CostTables
from dapple.planner.traffic import Devices, Floats


def layout_bounds(
    tables: CostTables,
    bounds: NDArray[np.int64],
    devices: tuple[Devices, ...],
    shard: bool = False,
) -> Floats:
    """Seconds below which no schedule of these layouts can stay.

    Args:
        tables: costs for one number of micro-batches.
        bounds: shape (P, S + 1), cuts of P layouts, each from 0 to N.
        devices: the devices of the S stages, the same in all layouts.
        shard: replicas may share out the optimizer's update.

    Returns:
        Shape (P,).
    """
    count, width = len(bounds), 2 * len(devices) - 1
    forward, backward, work, after = (np.zeros((count, width)) for _ in range(4))
    apart = np.zeros((count, width), dtype=np.bool_)
    for number, stage_devices in enumerate(devices):
        table = tables.stage(stage_devices)
        start, stop = bounds[:, number], bounds[:, number + 1]
        column = 2 * number
        forward[:, column] = table.least_forward[stop] - table.least_forward[start]
        backward[:, column] = table.least_backward[stop] - table.least_backward[start]
        work[:, column] = table.work[stop] - table.work[start]
        exposed = tables.least_exposed(stage_devices, start, stop)
        # The slowest device waits for an AllReduce behind the busiest one's last backward only.
        slowest = table.optimizer[stop] - table.optimizer[start]
        own = table.least_optimizer[stop] - table.least_optimizer[start]
        update = np.where(exposed > 0, slowest, own)
        after[:, column] = exposed + update / (len(stage_devices) if shard else 1)
        if number:
            link = tables.least_link(devices[number - 1], stage_devices)
            forward[:, column - 1] = link.forward[start]
            backward[:, column - 1] = link.backward[start]
            work[:, column - 1] = link.work[start]
            apart[:, column - 1] = apart[:, column] = ~tables.layers.linked[start]
    whole = ~apart.any(axis=1)
    result = np.empty(count)
    result[whole] = pipeline_bound(forward[whole], backward[whole], work[whole], after[whole])
    rest = ~whole
    result[rest] = pipeline_bound(
        forward[rest], backward[rest], work[rest], after[rest], apart[rest]
    )
    return result
