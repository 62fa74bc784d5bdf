"""The types that tensors have when a model runs under autocast: found out without computing them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dapple.graph.program import Program

TensorKind = tuple[tuple[int, ...], torch.dtype]


def dtypes_under(
    program: Program,
    inputs: Iterable[TensorKind | Any],
    context: AbstractContextManager[Any],
    device: torch.device,
) -> dict[str, torch.dtype]:
    """The type of every tensor in a program, by the name of its node, within a context.

    The whole program runs on tensors that have shape and type but no values.

    Args:
        program: the exported model.
        inputs: (shape, type) of tensors, and constants as they are, in order.
        context: entered around it, such as an autocast.
        device: where the model will run.
    """
    runner = _Types(program.module, device)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), torch.no_grad():
        arguments = [
            torch.empty(value[0], dtype=value[1], device=device)
            if isinstance(value, tuple)
            else value
            for value in inputs
        ]
        with context:
            runner.run(*arguments)
    return runner.found


class _Types(fx.Interpreter):
    """Notes the type of each tensor."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device
        self.found: dict[str, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Compute a node."""
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.found[n.name] = value.dtype
        return value

    def fetch_attr(self, target: str) -> Any:
        """A parameter or buffer, wherever it is now, as it will be on the device."""
        value = super().fetch_attr(target)
        if isinstance(value, torch.Tensor):
            return torch.empty_like(value, device=self._device)
        return value
