"""The user's optimizer and learning-rate scheduler for one rank's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dapple.errors import InputError


class Parameters(list[nn.Parameter]):
    """This rank's trainable parameters: a list, for an optimizer, that knows their names.

    Args:
        own: this rank's, by the model's own (first) names.
        model: the names of all parameters of the model.
    """

    def __init__(self, own: Mapping[str, nn.Parameter], model: Iterable[str] = ()) -> None:
        super().__init__(own.values())
        self._own = dict(own)
        self._model = frozenset(model) | set(own)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter), which the optimizers of torch take too."""
        return list(self._own.items())

    def groups(self, patterns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups by name patterns; a parameter goes with the first one that it matches.

        Every rank gets the same groups in the same order, also those that none of its parameters
        is in, so that a scheduler with a value per group works on all: one per pattern, then the
        rest.

            lambda p: torch.optim.AdamW(p.groups({"*.bias": {"weight_decay": 0.0}}), lr=1e-3)

        Args:
            patterns: shell pattern ("blocks.*.bias") -> options of the group.

        Raises:
            InputError: a pattern matches no parameter of the model.
        """
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self._model):
                some = ", ".join(sorted(self._model)[:3])
                raise InputError(
                    f'the pattern "{pattern}" matches no parameter of the model; its names are like '
                    f"{some} (a tied parameter has its first name only)"
                )
        members: dict[str | None, list[nn.Parameter]] = {p: [] for p in (*patterns, None)}
        for name, parameter in self._own.items():
            first = next((p for p in patterns if fnmatchcase(name, p)), None)
            members[first].append(parameter)
        groups = [{**options, "params": members[p]} for p, options in patterns.items()]
        return [*groups, {"params": members[None]}]


OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


def make_optimizer(
    factory: OptimizerFactory, parameters: Parameters
) -> torch.optim.Optimizer | None:
    """The optimizer of a rank; None if it has nothing to train.

    That is so, too, where the factory chooses among the parameters, and takes none of this rank's.

    Raises:
        InputError: the factory makes none, or one that a pipeline can't serve.
    """
    if not parameters:
        return None
    try:
        optimizer = factory(parameters)
    except ValueError as error:
        if "empty parameter list" not in str(error):  # torch's own words, of any optimizer
            raise
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer factory returned {type(optimizer).__name__}; return a torch.optim "
            "optimizer of the parameters that it gets"
        )
    name = type(optimizer).__name__
    if _needed(type(optimizer).step):
        raise InputError(
            f"{name} computes the loss again within its step, which one rank of a pipeline can't; "
            "take an optimizer whose step needs no closure, such as AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InputError(
            f"{name} takes sparse gradients only, but ranks sum dense ones; take Adam or AdamW"
        )
    return optimizer


def make_scheduler(
    factory: SchedulerFactory | None, optimizer: torch.optim.Optimizer | None
) -> LRScheduler | None:
    """The scheduler of a rank's optimizer; None if there is no optimizer.

    Raises:
        InputError: the factory makes none, or one that wants to be told a metric.
    """
    if factory is None or optimizer is None:
        return None
    scheduler = factory(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise InputError(
            f"the scheduler factory returned {type(scheduler).__name__}; return a scheduler of "
            "torch.optim.lr_scheduler for the optimizer that it gets"
        )
    if _needed(type(scheduler).step):
        raise InputError(
            f"{type(scheduler).__name__} wants a metric at each step, which the trainer does not "
            "choose for you; make it from trainer.optimizer where there is one, and call its step "
            "with what trainer.evaluate returns"
        )
    return scheduler


def _needed(method: Callable[..., Any]) -> list[str]:
    """Arguments that a method can't do without."""
    _, *parameters = inspect.signature(method).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
