"""A workload: a model together with what is needed to train it, and nothing about how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """What a "module:function" or a zoo name stands for.

    B is a batch size: rows of the first dimension of every input and target. The rows must be
    independent of each other (batch statistics aside), because pieces of a batch run apart.

    Attributes:
        name: how reports and plans call the model.
        model: any module, unmodified, or a list of layers; it is called with `inputs`.
        inputs: B -> example inputs of B rows, the same for the same B: a tensor, a tuple of
            positional or a dict of keyword arguments. Used to capture and to profile, so shapes
            and dtypes must be those of training; values need not be.
        targets: B -> example targets of B rows, as `loss` takes them. None: there are none, or
            they are among the inputs.
        loss: (output, targets) -> mean loss, a scalar with gradient. It must be a mean over the
            units that `weight` counts. None: the model itself returns that mean.
        weight: (inputs, targets) -> how many units the loss of this piece averages, such as
            unmasked tokens; a number >= 0. The objective over all pieces of a global batch is
            sum_i weight_i loss_i / sum_i weight_i, and a piece of weight 0 is skipped. None: rows.
        lengths: dimensions besides the batch that change from step to step, as `capture` takes
            them. None: there are none.
    """

    name: str
    model: nn.Module | Sequence[nn.Module]
    inputs: Callable[[int], Any]
    targets: Callable[[int], Tensor | tuple[Tensor, ...]] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    weight: Callable[[Any, Any], float] | None = None
    lengths: Mapping[int | str, Mapping[int, str]] | None = None
