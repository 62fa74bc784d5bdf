"""The types that tensors have when a model runs under autocast: found out without computing them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from dapple.graph.program import Program
from dapple.graph.valueless import InputKind, Valueless


def dtypes_under(
    program: Program,
    inputs: Iterable[InputKind],
    context: AbstractContextManager[Any],
    device: torch.device,
) -> dict[str, torch.dtype]:
    """The type of every tensor in a program, by the name of its node, within a context.

    The whole program runs without values.

    Args:
        program: the exported model.
        inputs: what it is given, in order.
        context: entered around it, such as an autocast.
        device: where the model will run.
    """
    runner = _Types(program, device)
    with torch.no_grad(), context:
        runner.run_on(inputs)
    return runner.found


class _Types(Valueless):
    """Notes the type of each tensor."""

    def __init__(self, program: Program, device: torch.device) -> None:
        super().__init__(program, device)
        self.found: dict[str, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Compute a node."""
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.found[n.name] = value.dtype
        return value
