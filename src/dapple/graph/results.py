"""What a model returns, value by value: how the outputs of pieces become those of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dapple.graph.program import Program


@dataclass(frozen=True)
class OutputSpec:
    """One value that the model returns.

    Attributes:
        is_tensor: it is computed; otherwise `constant` is its value.
        row_dim: the dimension that holds the rows; None: it has none, such as a mean.
        problem: why pieces of it can't be put together, in words; None: they can.
        constant: the value, where it is no tensor.
    """

    is_tensor: bool
    row_dim: int | None = None
    problem: str | None = None
    constant: Any = None


def output_specs(program: Program) -> tuple[OutputSpec, ...]:
    """The values that a program returns, flat, in order."""
    return tuple(_spec(program, value) for value in program.outputs)


def _spec(program: Program, output: object) -> OutputSpec:
    if not isinstance(output, fx.Node):
        return OutputSpec(False, constant=output)
    value = output.meta["val"]
    if not isinstance(value, torch.Tensor):
        return OutputSpec(False, problem="it is a number that depends on the batch")
    row_dim = program.row_dim(output)
    if row_dim is None and any(isinstance(size, torch.SymInt) for size in value.shape):
        shape = ", ".join(str(size) for size in value.shape)
        return OutputSpec(True, problem=f"the rows of its shape [{shape}] lie in no one dimension")
    return OutputSpec(True, row_dim)
