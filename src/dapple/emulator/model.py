"""A model whose layers wait for their profiled seconds and make tensors of their profiled sizes.

Each layer is one custom operator, which `torch.export` takes as it is: the capture, the stages and
the autograd graph are those of any model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dapple.costs import seconds_at
from dapple.emulator.scaling import FLOAT
from dapple.records import ModelProfile

_MOST_OWED = 0.001


class Clock(threading.local):
    """Waits; what a wait takes too long, the next one of this thread takes less.

    Attributes:
        on: whether waits take time; off while a model is captured.
    """

    def __init__(self) -> None:
        self.on = False
        self._owed = 0.0

    def wait(self, seconds: float) -> None:
        """Let so many seconds pass."""
        if not self.on:
            return
        begin = time.perf_counter()
        self._owed += seconds
        if self._owed > 0:
            time.sleep(self._owed)
        # A timer's few microseconds are made up for, not the seconds of a machine that is busy.
        self._owed = max(self._owed - (time.perf_counter() - begin), -_MOST_OWED)


clock = Clock()


@dataclass(frozen=True)
class _Layer:
    """What a layer does.

    Attributes:
        sizes: profiled batch sizes.
        forward, backward: seconds per batch size.
        widths: floats per row of its outputs with rows.
        fixed: floats of its outputs without rows.
        kept: floats per row that it keeps for its backward beyond its outputs.
    """

    sizes: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    widths: tuple[int, ...]
    fixed: tuple[int, ...]
    kept: int


_layers: list[_Layer] = []
"""Of all emulated models of this process; an operator can't hold an object, but a number."""


@torch.library.custom_op("dapple::emulate", mutates_args=())
def emulate(
    x: torch.Tensor, inputs: list[torch.Tensor], parameters: list[torch.Tensor], layer: int
) -> list[torch.Tensor]:
    """One layer's forward.

    Args:
        x: the model's input, shape (rows, 1); only its rows matter.
        inputs: what the layer reads.
        parameters: what it holds.
        layer: its number in `_layers`.

    Returns:
        Outputs with rows, outputs without, and what is kept for the backward.
    """
    rows, spec = x.shape[0], _layers[layer]
    clock.wait(seconds_at(spec.sizes, spec.forward, rows))
    return _outputs(x, spec)


@emulate.register_fake
def _(
    x: torch.Tensor, inputs: list[torch.Tensor], parameters: list[torch.Tensor], layer: int
) -> list[torch.Tensor]:
    return _outputs(x, _layers[layer])


def _outputs(x: torch.Tensor, spec: _Layer) -> list[torch.Tensor]:
    # Never written in a run: pages that nobody touches cost no memory. The capture compares values.
    make = x.new_empty if clock.on else x.new_zeros
    made = [make((x.shape[0], width)) for width in spec.widths]
    made += [make((size,)) for size in spec.fixed]
    return [*made, make((x.shape[0], spec.kept))]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, read, parameters, layer = inputs
    ctx.rows, ctx.layer = x.shape[0], layer
    ctx.save_for_backward(output[-1])
    ctx.shapes = [t.shape for t in read], [t.shape for t in parameters]


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    spec = _layers[ctx.layer]
    clock.wait(seconds_at(spec.sizes, spec.backward, ctx.rows))
    (kept,) = ctx.saved_tensors
    read, parameters = ([kept.new_zeros(shape) for shape in shapes] for shapes in ctx.shapes)
    return None, read, parameters, None


emulate.register_autograd(_backward, setup_context=_setup)


class EmulatedLayer(nn.Module):
    """One layer. Args: its number among all layers of the process, and its parameters."""

    def __init__(self, number: int, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.number = number
        self.held = nn.ParameterList(parameters)

    def forward(self, x: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Wait, and make the outputs."""
        found: list[torch.Tensor] = emulate(x, inputs, list(self.held), self.number)
        return found[:-1]


class EmulatedModel(nn.Module):
    """All layers of an emulated profile, as many modules in a list.

    Args:
        profile: from `emulated_profile`.
    """

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__()
        base = len(_layers)
        tied = [_parameter(group.parameter_bytes) for group in profile.tied]
        self._made = [
            [t for t in profile.tensors if t.producer == n] for n in range(profile.num_layers)
        ]
        self._read = [
            [t for t in profile.tensors if n in t.consumers] for n in range(profile.num_layers)
        ]
        layers = []
        for number, layer in enumerate(profile.layers):
            groups = [
                n
                for n, group in enumerate(profile.tied)
                if any(member.layer == number for member in group.members)
            ]
            own = layer.parameter_bytes - sum(profile.tied[n].parameter_bytes for n in groups)
            held = [_parameter(own), *(tied[n] for n in groups)]
            layers.append(EmulatedLayer(base + number, held))
            _layers.append(_spec(profile, number, self._made[number]))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every layer once; the last one's outputs as one number per row."""
        values: dict[str, list[torch.Tensor]] = {}
        outputs: list[torch.Tensor] = []
        for layer, read, made in zip(self.layers, self._read, self._made, strict=True):
            inputs = [value for tensor in read for value in values[tensor.name]]
            outputs = layer(x, inputs)
            rows = iter(outputs)
            with_rows = {t.name: [next(rows)] for t in made if t.bytes_per_sample}
            without = {t.name: [next(rows)] for t in made if t.fixed_bytes}
            for tensor in made:
                parts = with_rows.get(tensor.name, []) + without.get(tensor.name, [])
                values[tensor.name] = [p if tensor.needs_grad else p.detach() for p in parts]
        return outputs[-1]


def _spec(profile: ModelProfile, number: int, made: list[Any]) -> _Layer:
    layer = profile.layers[number]
    last = number == profile.num_layers - 1
    widths = [int(t.bytes_per_sample) // FLOAT for t in made if t.bytes_per_sample]
    fixed = [int(t.fixed_bytes) // FLOAT for t in made if t.fixed_bytes]
    saved = layer.saved_bytes[-1] // profile.batch_sizes[-1] // FLOAT if layer.saved_bytes else 0
    return _Layer(
        sizes=profile.batch_sizes,
        forward=layer.forward_seconds,
        backward=layer.backward_seconds,
        # The last layer hands one number per row to the loss; it makes no tensors for others.
        widths=(*widths, 1) if last else tuple(widths),
        fixed=tuple(fixed),
        kept=max(0, saved - sum(widths)),
    )


def _parameter(size: int) -> nn.Parameter:
    # The same on all replicas; pages of zeros that are only read take no memory.
    return nn.Parameter(torch.zeros(max(1, size // FLOAT)))
