"""`torch.compile` of a rank's stage, if the user wants it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dapple.errors import InputError, one_line
from dapple.graph import LayerGraph, StageProgram
from dapple.graph.surrounded import surrounded
from dapple.records import StagePlan

CompileOptions = bool | Mapping[str, Any]


def compiled(
    program: StageProgram, options: CompileOptions, stage: int, blocked: str | None = None
) -> StageProgram:
    """A stage that is compiled when it first runs, in training and in evaluation on its own.

    The number of rows is a variable of what is compiled; a single row may be compiled once more.

    Args:
        program: the stage.
        options: False leaves it as it is; keyword arguments of `torch.compile`.
        stage: its number, for messages.
        blocked: what of it can't be compiled, with a remedy.

    Raises:
        InputError: options that torch does not take, or a stage that can't be compiled.
    """
    if options is False:
        return program
    if blocked is not None:
        raise InputError(f"stage {stage} {blocked}")
    # The compiler takes seconds to import, which who starts a run need not wait for.
    from torch._dynamo.exc import TorchDynamoException

    given: dict[str, Any] = {"dynamic": True, **({} if options is True else options)}
    try:
        program.module.compile(**given)
    except (TypeError, RuntimeError, AssertionError, TorchDynamoException) as error:
        raise InputError(f"torch.compile refuses {given}: {one_line(error)}") from error
    return surrounded(program, lambda: _refusing(stage))


def what_blocks(
    graph: LayerGraph, stage: StagePlan, recomputes: bool, joint_statistics: bool
) -> str | None:
    """What of a stage can't be compiled, with a remedy; None: nothing.

    Args:
        graph: the captured model.
        stage: the stage in the plan.
        recomputes: it runs forwards again.
        joint_statistics: batch norms of its replicas are over the whole micro-batch.
    """
    if recomputes:
        return (
            "recomputes layers, which can't be compiled as well; leave out compile, or take a plan "
            "without recompute"
        )
    joint = joint_statistics and stage.replicas > 1
    if joint and graph.uses_batch_statistics(stage.start, stage.stop):
        return (
            "holds batch norms over the rows of several replicas, which can't be compiled; leave "
            'out compile, or take batch_norm="local"'
        )
    if any(spec.lengths for spec in graph.inputs):
        return "runs with lengths that change, which can't be compiled; leave out one of the two"
    return None


@contextmanager
def _refusing(stage: int) -> Iterator[None]:
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        raise InputError(
            f"stage {stage} can't be compiled: {one_line(error)}; leave out compile, or try another "
            f"backend, such as compile={{'backend': 'aot_eager'}}; known here: {_backends()}"
        ) from error


def _backends() -> str:
    return ", ".join(torch.compiler.list_backends())
