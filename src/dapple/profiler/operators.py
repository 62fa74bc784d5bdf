"""Prices every operator that torch dispatches, forward and backward, by its shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dapple.profiler.roofline import Roofline

aten = torch.ops.aten
Shapes = Sequence[int]
Price = Callable[[Roofline, Any, list[torch.Tensor], list[torch.Tensor]], float]


class OperatorSeconds(TorchDispatchMode):
    """While active, adds up what the dispatched operators would take on a device.

    Works on fake tensors: nothing is computed. Views cost nothing.

    Attributes:
        seconds: the sum since the last `taken`.
    """

    def __init__(self, roofline: Roofline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roofline = roofline
        self.seconds = 0.0

    def charge(self, seconds: float) -> None:
        """Add what an operator takes that is not dispatched as one."""
        self.seconds += seconds

    def taken(self) -> float:
        """The sum since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and charge for it."""
        result = func(*args, **(kwargs or {}))
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not _is_free(func, given, made):
            price: Price = _PRICES.get(func.overloadpacket, _by_bytes)
            self.seconds += price(self.roofline, args, given, made)
        return result


def _is_free(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Views, and what only reserves memory."""
    if func.overloadpacket in _FREE or not made:
        return True
    if func._schema.is_mutable:
        return False
    storages = {t.untyped_storage()._cdata for t in given}
    return all(t.untyped_storage()._cdata in storages for t in made)


_FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_FREE |= {aten.detach, aten.alias, aten.sym_size, aten.scalar_tensor, aten.lift_fresh}


def _bytes(tensors: Sequence[torch.Tensor]) -> float:
    """What they hold; one that is expanded is read as small as it is stored."""
    return float(sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors))


def _by_bytes(
    roofline: Roofline, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]
) -> float:
    return roofline.memory(_bytes(given) + _bytes(made))


def _gather(
    roofline: Roofline, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]
) -> float:
    # Of the table only the rows that are asked for are read.
    return roofline.memory(2 * _bytes(made))


def _product(
    roofline: Roofline, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]
) -> float:
    left, right = (a.shape for a in [a for a in args if isinstance(a, torch.Tensor)][-2:])
    batch = left[0] if len(left) == 3 else 1
    n = right[-1] if len(right) > 1 else 1
    return roofline.product(left[-2], n, left[-1], _bytes(given) + _bytes(made), batch)


def _attention(passes: float) -> Price:
    """Fused attention: `passes` products of [T, D] and [T, D], the scores stay on the chip."""

    def price(
        roofline: Roofline, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> float:
        # The forward's arguments start with queries, keys; the backward's with the output's
        # gradient, shaped like the queries, then queries, keys.
        queries, keys = given[0], given[1 if passes < 3 else 2]
        batch, heads, rows, size = queries.shape
        columns = keys.shape[2]
        once = roofline.product(rows, columns, size, 0.0, batch * heads)
        moved = _bytes(given) + _bytes(made)
        return max(passes * once, roofline.memory(moved))

    return price


def _convolution(
    roofline: Roofline, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]
) -> float:
    moved = _bytes(given) + _bytes(made)
    return _convolve(roofline, args[1].shape, made[0].shape, args[3], args[8], moved)


def _convolve(
    roofline: Roofline, weight: Shapes, output: Shapes, stride: Shapes, groups: int, moved: float
) -> float:
    pixels = output[0] * math.prod(output[2:])
    sums = math.prod(weight[1:])
    winograd = list(weight[2:]) == [3, 3] and set(stride) == {1} and weight[1] >= 16
    seconds = roofline.convolution(pixels, weight[0] // groups, sums, moved / groups, winograd)
    return groups * seconds


def _convolution_backward(
    roofline: Roofline, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]
) -> float:
    gradient, x, weight, _, stride, *_, groups, wanted = args
    moved = _bytes([gradient, x, weight])
    # Either gradient is a convolution with as many operations as the forward.
    once = _convolve(roofline, weight.shape, gradient.shape, stride, groups, moved)
    bias = roofline.memory(_bytes([gradient])) if wanted[2] else 0.0
    return once * (int(wanted[0]) + int(wanted[1])) + bias


_PRICES: dict[Any, Price] = {
    aten.mm: _product,
    aten.addmm: _product,
    aten.bmm: _product,
    aten.baddbmm: _product,
    aten.embedding: _gather,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention(2.0),
    # The scores are computed anew, then four gradients' products.
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5.0),
}
