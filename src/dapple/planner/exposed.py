"""What of a stage's AllReduce its own last backward does not hide (rule 7 of docs/semantics.md).

The gradients of layer k are complete when the last backward has done layers k.. of the stage, and
after that all layers start..k still have to be added up, so behind the backward's end there are at
least

    max_k [ sum_{start<=l<=k} A_l - sum_{start<=l<k} B_l ]     A_l: AllReduce, B_l: last backward

seconds. Buckets wait for their last gradient and so never end sooner; nor does a fixed cost per
AllReduce make them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def exposed_seconds(
    size: Floats,
    backward: Floats,
    fixed: float | Floats,
    per_byte: float | Floats,
    marks: Ints | None = None,
) -> Floats:
    """At least the seconds from the end of a stage's last backward to that of its AllReduce.

    Args:
        size: shape (N + 1,), prefix sums of the layers' gradient bytes.
        backward: shape (..., N + 1), prefix sums of their last backward, seconds.
        fixed, per_byte: shape (...), AllReduce seconds whatever the bytes, and for each byte.
        marks: shape (n + 1,), layer numbers where stages begin and end; None: every layer. With
            fewer of them a stage's first layers are taken to have parameters, so the result may
            be too large by `fixed`.

    Returns:
        Shape (..., n + 1, n + 1), for stages from one mark to another; 0 where there are none.
    """
    if marks is None:
        marks = np.arange(len(size))
    fixed, per_byte = np.asarray(fixed)[..., None, None], np.asarray(per_byte)[..., None]
    # From one layer to the next; the backward of layer k itself is done when k's gradients are.
    late = np.maximum.reduceat(per_byte * size[1:] - backward[..., :-1], marks[:-1], axis=-1)
    base = per_byte * size[marks] - backward[..., marks]
    # Layers below the stage's first one with parameters have nothing to add up.
    first = np.searchsorted(size[marks], size[marks], side="right") - 1
    parts = np.arange(len(marks) - 1)
    longest = np.where(parts < first[:, None], -np.inf, late[..., None, :])
    np.maximum.accumulate(longest, axis=-1, out=longest)
    exposed = np.zeros((*longest.shape[:-1], len(marks)))
    np.maximum(longest - (base[..., None] - fixed), 0.0, out=exposed[..., 1:])
    exposed *= size[marks] > size[marks][:, None]
    return exposed


def exposed_alone(size: Floats, backward: Floats, fixed: float, per_byte: float) -> float:
    """`exposed_seconds` of the one stage that holds all these layers."""
    own = size - size[0]
    first = int(np.searchsorted(own, 0.0, side="right")) - 1
    if own[-1] <= 0:
        return 0.0
    late = per_byte * own[1:] - (backward[:-1] - backward[0])
    return max(0.0, fixed + float(late[first:].max()))


def bucketed_seconds(
    buckets: Sequence[tuple[int, int]], backward: Floats, start: int, fixed: float, per_byte: float
) -> float:
    """The same for the buckets of one stage: what a simulation without contention gives.

    Args:
        buckets: first layer and bytes of each, in the order in which they are complete.
        backward: as above.
        start: the stage's first layer.
        fixed, per_byte: as above.
    """
    end = -np.inf
    for first, size in buckets:
        lead = float(backward[first] - backward[start])
        end = max(end, -lead) + fixed + size * per_byte
    return float(max(end, 0.0))
