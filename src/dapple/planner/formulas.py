"""The step time of a pipeline in closed form (DAPPLE, equations 1 and 2, Algorithm 1).

All formulas take the *expanded* stage list: the transfer between two compute stages is a stage of
its own, with the activations' transfer as F, the gradients' as B, and no AllReduce.

    stage      0   0>1   1   1>2   2
    F         F_0  t_0  F_1  t_1  F_2       seconds per micro-batch
    B         B_0  u_0  B_1  u_1  B_2
    AllReduce A_0   0   A_1   0   A_2       seconds per step

None of them knows the warm-up counts K_i: the simulator has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def expand(compute: Sequence[float], transfers: Sequence[float]) -> list[float]:
    """Interleave S compute stages with the S - 1 transfers between them.

    >>> expand([1.0, 2.0, 3.0], [0.1, 0.2])
    [1.0, 0.1, 2.0, 0.2, 3.0]
    """
    mixed = [0.0] * (len(compute) + len(transfers))
    mixed[0::2] = compute
    mixed[1::2] = transfers
    return mixed


def printed_pivot(forward: Sequence[float], backward: Sequence[float], micro_batches: int) -> int:
    """The pivot stage as Algorithm 1 prints it, with M - 1 on both sides.

    From the last stage to the first, s replaces Q when

        (M-1) (F_s + B_s) > (M-1) (F_Q + B_Q) + sum_{s<a<Q} (F_a + B_a)
    """
    return _pivot(forward, backward, micro_batches - 1, micro_batches - 1)


def corrected_pivot(forward: Sequence[float], backward: Sequence[float], micro_batches: int) -> int:
    """The pivot that agrees with equations 1 and 2: M (F_Q + B_Q) on the right side."""
    return _pivot(forward, backward, micro_batches - 1, micro_batches)


def _pivot(forward: Sequence[float], backward: Sequence[float], left: int, right: int) -> int:
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    pivot = len(both) - 1
    for s in range(len(both) - 2, -1, -1):
        if left * both[s] > right * both[pivot] + sum(both[s + 1 : pivot]):
            pivot = s
    return pivot


def latency(
    forward: Sequence[float],
    backward: Sequence[float],
    allreduce: Sequence[float],
    micro_batches: int,
    pivot: int,
) -> float:
    """Warm-up, steady and ending phase around a pivot stage Q (equations 1 and 2), seconds.

        T_w = sum_{s=0..Q} F_s        T_s = (M-1) (F_Q + B_Q)
        T_e = max_s ( AR_s + (sum_{a=s..Q} B_a if s <= Q else -sum_{a=Q+1..s-1} B_a) )

    For s > Q the paper prints the sum from Q to s; the gradient of the last micro-batch leaves
    stage s before it reaches Q, so only the stages in between count. With the printed offset the
    result would differ only where an AllReduce behind the pivot decides.
    """
    steady = (micro_batches - 1) * (forward[pivot] + backward[pivot])
    ending = max(
        reduce + (sum(backward[s : pivot + 1]) if s <= pivot else -sum(backward[pivot + 1 : s]))
        for s, reduce in enumerate(allreduce)
    )
    return sum(forward[: pivot + 1]) + steady + ending


def paper_latency(
    forward: Sequence[float],
    backward: Sequence[float],
    allreduce: Sequence[float],
    micro_batches: int,
) -> float:
    """Step seconds with the printed pivot: for reproduction only, far too low at small M."""
    pivot = printed_pivot(forward, backward, micro_batches)
    return latency(forward, backward, allreduce, micro_batches, pivot)


def corrected_latency(
    forward: Sequence[float],
    backward: Sequence[float],
    allreduce: Sequence[float],
    micro_batches: int,
) -> float:
    """Step seconds with the corrected pivot: never above a simulation, a few per cent below."""
    pivot = corrected_pivot(forward, backward, micro_batches)
    return latency(forward, backward, allreduce, micro_batches, pivot)


def pipeline_bound(
    forward: Floats,
    backward: Floats,
    work: Floats,
    after: Floats,
    apart: NDArray[np.bool_] | None = None,
) -> Floats:
    """No schedule of these stages ends earlier, seconds.

        max_s [ sum_{a<s} F_a + W_s + max(sum_{a<s} B_a + A_0, A_s) ]    a stage does all its work
        max_s [ sum_a F_a + sum_{a>=s} B_a + A_s ]                       one micro-batch's way

    Args:
        forward, backward: shape (..., S), expanded stages; the time of the first micro-batch's
            forward and of the last one's backward.
        work: W, shape (..., S): what the stage computes or transfers in the whole step.
        after: A, shape (..., S): AllReduce and optimizer once the stage's last backward is done.
        apart: shape (..., S): the stage does not wait for the ones before it; None: all do.

    Returns:
        Shape (...).
    """
    before_f = np.cumsum(forward, axis=-1) - forward
    before_b = np.cumsum(backward, axis=-1) - backward
    if apart is not None:
        before_f = before_f - np.maximum.accumulate(np.where(apart, before_f, 0.0), axis=-1)
        base_b = np.maximum.accumulate(np.where(apart, before_b, 0.0), axis=-1)
        busy = before_f + work + np.maximum(before_b - base_b, after)
        alone: Floats = busy.max(axis=-1)
        return alone
    busy = before_f + work + np.maximum(before_b + after[..., :1], after)
    total_b = backward.sum(axis=-1, keepdims=True)
    through = forward.sum(axis=-1, keepdims=True) + total_b - before_b + after
    bound: Floats = np.maximum(busy.max(axis=-1), through.max(axis=-1))
    return bound
