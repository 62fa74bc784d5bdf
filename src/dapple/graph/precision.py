"""Mixed precision: autocast around every forward and loss, on all stages alike.

What crosses a cut has the type that the operator before it gives under autocast, which is another
than at capture. A receiver has to know it before anything has run, so it is found out by running
the whole model on tensors without values.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from dapple.errors import CaptureError, InputError, one_line
from dapple.graph.layers import LayerGraph
from dapple.graph.program import BoundaryTensor
from dapple.graph.stage import StageProgram
from dapple.graph.surrounded import surrounded

PrecisionName = Literal["float32", "bf16", "fp16"]
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """In which types a stage computes.

    Attributes:
        name: "float32" computes in the model's own types, the others under autocast.
        device: where it computes.
    """

    name: PrecisionName
    device: torch.device

    def __post_init__(self) -> None:
        if self.name not in get_args(PrecisionName):
            known = ", ".join(f'"{name}"' for name in get_args(PrecisionName))
            raise InputError(f'precision "{self.name}" is unknown; known: {known}')

    def forward(self) -> AbstractContextManager[Any]:
        """Around a forward or a loss."""
        if self.name not in _TYPES:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_TYPES[self.name])

    def step(self) -> AbstractContextManager[Any]:
        """Around all forwards and backwards of a step: weights are cast once for all micro-batches.

        Autocast itself is off in it, as it has to be in a backward. torch keeps the casts until the
        outermost autocast ends; without it each micro-batch in flight would hold its own.
        """
        if self.name not in _TYPES:
            return nullcontext()
        return torch.autocast(self.device.type, enabled=False)

    def program(self, graph: LayerGraph, program: StageProgram, training: bool) -> StageProgram:
        """A stage that runs in this precision; made before other stages' parameters are freed.

        Raises:
            CaptureError: the types of what crosses cuts can't be told.
        """
        if self.name not in _TYPES:
            return program
        # In one go: finding out runs the whole model on tensors without values.
        tensors = self.typed(graph, (*program.reads, *program.makes), training)
        count = len(program.reads)
        program = dataclasses.replace(program, reads=tensors[:count], makes=tensors[count:])
        return self.around(program)

    def around(self, program: StageProgram) -> StageProgram:
        """A stage whose forwards run in this precision; what it says of tensors stays the model's."""
        return surrounded(program, self.forward) if self.name in _TYPES else program

    def typed(
        self, graph: LayerGraph, tensors: tuple[BoundaryTensor, ...], training: bool = True
    ) -> tuple[BoundaryTensor, ...]:
        """Tensors between layers with the types that they have in this precision.

        Raises:
            CaptureError: they can't be told.
        """
        if self.name not in _TYPES or not tensors:
            return tensors
        try:
            types = graph.dtypes_under(self.forward(), self.device, training)
        except Exception as error:
            raise CaptureError(
                f"the types under {self.name} of the tensors between stages can't be told: "
                f'{one_line(error)}; train in precision "float32"'
            ) from error
        return tuple(dataclasses.replace(t, dtype=types[t.name]) for t in tensors)
