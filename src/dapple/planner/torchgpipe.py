"""torchgpipe's balance of a sequence over devices, by time: `balance_by_time`.

Sources: Kim et al., "torchgpipe" (2020), arXiv 2004.09910, section 3; its `balance_cost`, which
follows Barany and Grinberg, "Block partitions of sequences" (2015), arXiv 1308.2452, theorem 1.

The objective is even blocks, not the smallest largest one: costs scaled to 0..1 are cut so that
no block's sum exceeds another's by more than 1, the largest single cost. There is one stage per
device and no replication, and torchgpipe runs it with GPipe's schedule. We start from blocks of
equally many layers; torchgpipe starts with the remainder of N / devices in the last block, from
where the same moves take very long for thousands of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dapple.planner.layout import Layout
from dapple.planner.problem import Problem

_ROUNDING = 1e-9


def torchgpipe(problem: Problem, micro_batches: int) -> Iterator[Layout]:
    """As many stages as there are devices or layers, one device each, balanced by time.

    Where the balance leaves a block empty, which torchgpipe refuses, the block is left out.
    """
    tables = problem.tables(micro_batches)
    forward, backward = tables.layers.layer_seconds(tables.first_rows)
    both = forward + backward
    costs = [float(b - a) for a, b in itertools.pairwise(both)]
    stops = block_partition(costs, min(problem.num_layers, problem.num_devices))
    bounds = tuple(sorted({0, *stops}))
    yield Layout(bounds, tuple((device,) for device in range(len(bounds) - 1)), micro_batches)


def block_partition(costs: Sequence[float], parts: int) -> list[int]:
    """Cut a sequence into blocks whose sums differ by at most the largest cost.

    Args:
        costs: N costs; they are scaled so that the least is 0 and the largest 1.
        parts: 1 <= parts <= N.

    Returns:
        Where each block stops, ascending; the last is N. Blocks may be empty.

    >>> block_partition([1.0, 1.0, 1.0, 3.0, 1.0], 2)
    [2, 5]
    """
    prefix = np.concatenate([[0.0], np.cumsum(scaled(costs))])
    bounds = np.arange(parts + 1) * len(costs) // parts
    # (1) Take the largest block p. (2) Stop when the smallest, q, is at most 1 smaller.
    # (3) Move one element from q's neighbour on the way to p into q, until p itself has given.
    #
    #     |  q  | a b |  p  |      ->      |  q a | b |  p  |
    #
    while True:
        sums = np.diff(prefix[bounds])
        p = int(sums.argmax())
        largest, giver = float(sums[p]), -1
        while giver != p:
            q = _smallest(sums, p)
            if largest <= sums[q] + 1 + _ROUNDING:
                return [int(stop) for stop in bounds[1:]]
            giver = q - 1 if p < q else q + 1
            bounds[max(giver, q)] += -1 if p < q else 1
            sums = np.diff(prefix[bounds])


def scaled(costs: Sequence[float]) -> list[float]:
    """Costs moved and scaled into 0..1, as torchgpipe does; equal costs all become 0.

    >>> scaled([2.0, 4.0, 3.0])
    [0.0, 1.0, 0.5]
    """
    low, width = min(costs), max(costs) - min(costs)
    return [(cost - low) / width if width > 0 else 0.0 for cost in costs]


def _smallest(sums: NDArray[np.float64], p: int) -> int:
    """The smallest block; of equal ones that closest to p, so that its neighbour is not empty."""
    equal = np.flatnonzero(sums == sums.min())
    return int(equal[np.abs(equal - p).argmin()])
