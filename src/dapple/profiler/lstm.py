"""An LSTM as a device's library runs it: one kernel per step, gates kept for the backward.

On the CPU torch takes an LSTM apart into steps when it has no numbers, and hides its operations
when it has. Both would price and count something else than what a device does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dapple.errors import InputError
from dapple.profiler.roofline import Roofline

Charge = Callable[[float], None]
_GATES = 4


class LibraryLSTM(TorchFunctionMode):
    """While active, an LSTM gives tensors of the right shapes and keeps what a library keeps.

    Args:
        roofline: prices it; None: nobody asks.
        charge: told the seconds of each forward and backward.
    """

    def __init__(self, roofline: Roofline | None = None, charge: Charge | None = None) -> None:
        super().__init__()
        self._roofline = roofline
        self._charge = charge

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace `aten.lstm`, run everything else.

        Raises:
            InputError: an LSTM of packed sequences.
        """
        if func is not torch.ops.aten.lstm.input:
            if getattr(func, "__name__", "").startswith("lstm"):
                raise InputError("an LSTM of packed sequences can't be profiled analytically")
            return func(*args, **(kwargs or {}))
        x, states, weights, has_biases, layers, _dropout, _train, both_ways, batch_first = args
        h0, c0 = states
        each = (4 if has_biases else 2) * (2 if both_ways else 1)
        for layer in range(layers):
            used = weights[layer * each : (layer + 1) * each]
            x = _LSTM.apply(x, h0, self._price, batch_first, *used)  # type: ignore[no-untyped-call]
        return x, torch.empty_like(h0), torch.empty_like(c0)

    def _price(self, steps: int, rows: int, inputs: int, width: int, backward: bool) -> None:
        if self._charge is not None and self._roofline is not None:
            size = torch.empty((), dtype=getattr(torch, self._roofline.dtype)).element_size()
            seconds = lstm_seconds(self._roofline, steps, rows, inputs, width, size, backward)
            self._charge(seconds)


def lstm_seconds(
    roofline: Roofline,
    steps: int,
    rows: int,
    inputs: int,
    width: int,
    size: int,
    backward: bool,
) -> float:
    """Seconds of one direction of one layer.

    The input's products of all steps are one; the state's follow each other, each reading the
    weights anew, for they don't fit the processors' registers.

    Args:
        roofline: the device.
        steps: length of the sequence.
        rows: batch size.
        inputs, width: features of the input and of the state.
        size: bytes of a number.
        backward: the gradients, else the outputs.
    """
    gates = _GATES * width
    weights, states = gates * width * size, rows * (gates + width) * size
    over_time = roofline.product(
        rows * steps, gates, inputs, (rows * steps * (inputs + gates) + gates * inputs) * size
    )
    step = roofline.product(rows, gates, width, weights + states)
    pointwise = roofline.memory(2 * states)
    seconds = over_time + steps * (step + pointwise)
    if backward:
        moved = (rows * steps * (inputs + gates) + gates * inputs) * size
        seconds += roofline.product(gates, inputs, rows * steps, moved)
        moved = (rows * steps * (width + gates) + gates * width) * size
        seconds += roofline.product(gates, width, rows * steps, moved)
    return seconds


class _LSTM(torch.autograd.Function):
    """Shapes and savings of a layer; its numbers are of no use."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h0: Tensor, price: Any, batch_first: bool, *weights: Tensor
    ) -> Tensor:
        """[B, T, I] (or [T, B, I]) -> [B, T, directions * C]."""
        width = h0.shape[-1]
        directions = 2 if len(weights) in (4, 8) and _both_ways(weights, width) else 1
        rows, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
        y = x.new_empty((*x.shape[:2], directions * width))
        kept = x.new_empty((rows, steps, directions * (_GATES + 1) * width))
        ctx.save_for_backward(x, y, kept, *weights)
        ctx.price, ctx.directions = price, directions
        ctx.sizes = (int(steps), int(rows), int(x.shape[2]), int(width))
        for _ in range(directions):
            price(*ctx.sizes, False)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Empty gradients."""
        x, _, _, *weights = ctx.saved_tensors
        for _ in range(ctx.directions):
            ctx.price(*ctx.sizes, True)
        given = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        return given, None, None, None, *(torch.empty_like(w) for w in weights)


def _both_ways(weights: tuple[Tensor, ...], width: int) -> bool:
    """The second half is another direction's: its first weight reads the input, too."""
    half = len(weights) // 2
    return weights[0].shape == weights[half].shape and weights[half].dim() == 2
