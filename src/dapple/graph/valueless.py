"""Running a program on tensors that have shape and type but no values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dapple.graph.program import Program

InputKind = tuple[tuple[int, ...], torch.dtype] | Any
"""Shape and type of a tensor; a constant as it is."""


class Valueless(fx.Interpreter):
    """Runs a program so; its parameters and buffers stay where and what they are.

    Args:
        program: the exported model.
        device: where it is to run; None: on the devices of the capture.
    """

    def __init__(self, program: Program, device: torch.device | None = None) -> None:
        super().__init__(program.module)
        self._placeholders = program.placeholders
        self._device = device

    def run_on(self, inputs: Iterable[InputKind]) -> Any:
        """The program's flat outputs, for its inputs in order."""
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
            arguments = [
                torch.empty(kind[0], dtype=kind[1], device=self._device or _device_of(node))
                if isinstance(kind, tuple)
                else kind
                for kind, node in zip(inputs, self._placeholders, strict=True)
            ]
            return self.run(*arguments, enable_io_processing=False)

    def fetch_attr(self, target: str) -> Any:
        """A parameter or buffer without its values."""
        value = super().fetch_attr(target)
        if isinstance(value, torch.Tensor):
            return torch.empty_like(value, device=self._device).requires_grad_(value.requires_grad)
        return value


def _device_of(placeholder: fx.Node) -> torch.device:
    device: torch.device = placeholder.meta["val"].device
    return device
