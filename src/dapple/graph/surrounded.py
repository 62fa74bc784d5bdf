"""A stage whose forward runs within a context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dapple.graph.stage import StageProgram


@dataclass(frozen=True)
class _Surrounded(StageProgram):
    """`inner` within `around`."""

    inner: StageProgram | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(
        self, *arguments: Any, **keywords: Any
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
        assert self.inner is not None
        with self.around():
            return self.inner(*arguments, **keywords)


def surrounded(
    program: StageProgram, around: Callable[[], AbstractContextManager[Any]]
) -> StageProgram:
    """The same stage, with a context entered around each forward.

    Args:
        program: the stage.
        around: makes the context.
    """
    names = [field.name for field in dataclasses.fields(StageProgram)]
    return _Surrounded(
        **{name: getattr(program, name) for name in names}, inner=program, around=around
    )
