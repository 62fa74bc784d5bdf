"""What a job trains with: its model, data, optimizer, scheduler, loss and metrics, as functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dapple.errors import InputError
from dapple.job import Job
from dapple.profiler.local import Factory, load_factory, load_function
from dapple.runtime.metrics import Metric
from dapple.runtime.optimizers import (
    OptimizerFactory,
    Parameters,
    SchedulerFactory,
    make_optimizer,
    make_scheduler,
)
from dapple.workload import Workload


def workload_factory(job: Job) -> Factory:
    """What makes the job's workload, with the job's own loss; can be pickled.

    Raises:
        InputError: no such model, module or function, or arguments that it does not take.
    """
    factory = load_factory(job.model.factory, job.model.arguments)
    for path in (job.model.loss, job.model.weight):
        if path is not None:
            load_function(path)
    return functools.partial(_workload, factory, job.model.loss, job.model.weight)


def _workload(factory: Factory, loss: str | None, weight: str | None) -> Workload:
    workload = factory()
    if loss is not None:
        # What the workload counts belongs to its own loss.
        workload = dataclasses.replace(workload, loss=load_function(loss), weight=None)
    if weight is not None:
        workload = dataclasses.replace(workload, weight=load_function(weight))
    return workload


def metrics_of(job: Job) -> dict[str, Metric]:
    """The job's metrics by name.

    Raises:
        InputError: no such module or function.
    """
    return {name: load_function(path) for name, path in job.metrics.items()}


def optimizer_factory(job: Job) -> OptimizerFactory:
    """Makes the job's optimizer from a rank's parameters.

    Raises:
        InputError: no such function.
    """
    section = job.optimizer
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items()}
    kind = load_function(section.name) if ":" in section.name else kinds[section.name.lower()]

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        given: Any = parameters.groups(section.groups) if section.groups else parameters
        optimizer: torch.optim.Optimizer = kind(given, **section.arguments)
        _check_groups(optimizer, section.groups)
        return optimizer

    return make


def _check_groups(
    optimizer: torch.optim.Optimizer, groups: Mapping[str, Mapping[str, Any]]
) -> None:
    # torch takes any key in a group, and a misspelt one would do nothing.
    known = getattr(optimizer, "defaults", {})
    for pattern, options in groups.items():
        for option in options:
            if option not in known:
                raise InputError(
                    f'optimizer.groups: {type(optimizer).__name__} has no option "{option}", given '
                    f'for "{pattern}"; it has: {", ".join(known)}'
                )


def scheduler_factory(job: Job) -> SchedulerFactory | None:
    """Makes the job's scheduler from an optimizer; None: the learning rate stays.

    Raises:
        InputError: no such class or function.
    """
    section = job.scheduler
    if section is None:
        return None
    kind: Callable[..., Any] | None
    if ":" in section.name:
        kind = load_function(section.name)
    else:
        found = vars(torch.optim.lr_scheduler)
        kind = found.get(section.name)
        base = torch.optim.lr_scheduler.LRScheduler
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise InputError(
                f'scheduler.name: torch.optim.lr_scheduler has no class "{section.name}"; write '
                'one of its names, such as CosineAnnealingLR, or "my_module:function"'
            )
    return functools.partial(kind, **section.arguments)


def check_optimizer(job: Job) -> None:
    """Make the job's optimizer and scheduler once, for parameters that stand for the model's.

    Raises:
        InputError: one can not be made; names it.
    """
    section = job.optimizer
    wrong = (TypeError, ValueError, RuntimeError, KeyError, AttributeError)
    try:
        optimizer = make_optimizer(optimizer_factory(job), _StandIns())
    except wrong as error:
        raise InputError(
            f'optimizer "{section.name}" refuses {section.arguments}: {error}; pass arguments of '
            "torch.optim"
        ) from error
    if job.scheduler is None:
        return
    try:
        make_scheduler(scheduler_factory(job), optimizer)
    except wrong as error:
        raise InputError(
            f'scheduler "{job.scheduler.name}" refuses {job.scheduler.arguments}: {error}; pass '
            "arguments of torch.optim.lr_scheduler"
        ) from error


class _StandIns(Parameters):
    """Parameters of a model that is not there: one for each pattern, whatever it matches."""

    def __init__(self) -> None:
        super().__init__({"any": self._one()})

    def groups(self, patterns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A group per pattern, then the rest."""
        groups = [{**options, "params": [self._one()]} for options in patterns.values()]
        return [*groups, {"params": list(self)}]

    @staticmethod
    def _one() -> nn.Parameter:
        return nn.Parameter(torch.zeros(2, 2))  # two dimensions, as Muon wants them
