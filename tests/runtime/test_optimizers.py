"""Any optimizer of torch, groups of parameters by name, and learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

from dapple.errors import InputError
from dapple.graph import capture
from dapple.runtime import Parameters
from dapple.runtime.trainer import Trainer
from tests.graph.models import CASES
from tests.runtime import cases
from tests.runtime.threads import on_ranks

STEPS = 4
OPTIMIZERS = sorted(
    (
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ),
    key=lambda kind: kind.__name__,
)
REFUSED = {"LBFGS": "computes the loss again", "SparseAdam": "takes sparse gradients only"}
# Its step rounds to bf16, where the order of a sum shows.
ROUNDING = {"Muon": 1e-4}


def one_process(make: Callable[[Parameters], Any], schedule: Any = None) -> dict[str, Tensor]:
    """Weights after the steps of a plain loop."""
    model, example = cases.make_model("mlp"), cases.EXAMPLES["mlp"]
    optimizer = make(Parameters(dict(model.named_parameters())))
    scheduler = schedule(optimizer) if schedule else None
    for step in range(STEPS):
        inputs, targets = example.batch(12, step)
        optimizer.zero_grad()
        example.loss(model(inputs), targets).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {n: v.detach() for n, v in model.state_dict().items()}


def trained(trainer: Trainer) -> dict[str, Tensor]:
    for step in range(STEPS):
        trainer.step(*cases.EXAMPLES["mlp"].batch(12, step))
    return trainer.state_dict()


def on_stages(make: Any, **arguments: Any) -> list[dict[str, Tensor]]:
    """Weights by rank of three stages, the one in the middle with two replicas."""
    graph = cases.build("mlp")
    plan = cases.make_plan(graph, (1, 2, 1), 12, 3)
    return on_ranks(graph, plan, trained, make, **arguments)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_trains_as_on_one_process_or_is_refused(kind: Any) -> None:
    """Those that can not work say why."""

    def make(parameters: list[Any]) -> Any:
        matrices = [p for p in parameters if p.dim() == 2]
        return kind(matrices if kind.__name__ == "Muon" else parameters)

    if kind.__name__ in REFUSED:
        with pytest.raises(InputError, match=f"{kind.__name__} {REFUSED[kind.__name__]}"):
            on_stages(make)
    else:
        tolerance = ROUNDING.get(kind.__name__, cases.TOLERANCE)
        assert cases.global_error(on_stages(make), one_process(make)) < tolerance


def in_groups(parameters: Parameters) -> torch.optim.Optimizer:
    """Biases without decay, the last layer with a rate of its own, the rest as told."""
    groups = parameters.groups({"*.bias": {"weight_decay": 0.0}, "layers.5.*": {"lr": 0.3}})
    return torch.optim.SGD(groups, lr=0.1, momentum=0.5, weight_decay=0.2)


def test_groups_by_name_train_as_on_one_process() -> None:
    """Whichever stage the names are on."""
    assert cases.global_error(on_stages(in_groups), one_process(in_groups)) < cases.TOLERANCE


def test_every_rank_has_all_groups_in_one_order() -> None:
    """Empty ones too, for a scheduler with a value per group."""
    sizes = []

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        optimizer = in_groups(parameters)
        sizes.append([len(group["params"]) for group in optimizer.param_groups])
        return optimizer

    schedule = lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.5**n, lambda n: 1.0, lambda n: 2.0])  # noqa: E731
    weights = on_stages(make, scheduler=schedule)
    assert sorted(sizes) == [[2, 0, 2]] * 3 + [[2, 1, 1]]
    assert cases.global_error(weights, one_process(in_groups, schedule)) < cases.TOLERANCE


def test_a_name_goes_with_the_first_pattern() -> None:
    """`layers.5.bias` is a bias first."""
    parameters = Parameters(dict(cases.make_model("mlp").named_parameters()))
    groups = parameters.groups({"*.bias": {}, "layers.5.*": {}})
    names = {id(p): name for name, p in parameters.named()}
    assert [names[id(p)] for p in groups[1]["params"]] == ["layers.5.weight"]


def test_torchs_own_named_parameters() -> None:
    """Pairs of name and parameter, as the optimizers of torch take them."""
    make = lambda p: torch.optim.AdamW(p.named(), lr=0.01)  # noqa: E731
    assert cases.global_error(on_stages(make), one_process(make)) < cases.TOLERANCE


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    """On every rank, since the names are the whole model's; one on another stage is none."""
    parameters = Parameters({}, ["layers.0.weight", "layers.0.bias"])
    assert parameters.groups({"*.bias": {}}) == [{"params": []}, {"params": []}]
    with pytest.raises(InputError, match=r'pattern "\*.biass" matches no .* like layers.0.bias'):
        parameters.groups({"*.biass": {}})


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)],
            [2],
        ),
    ],
    ids=["cosine", "one cycle", "warm-up, then decay"],
)
def test_schedulers_move_the_rate_as_on_one_process(schedule: Any) -> None:
    """One step of the scheduler per update."""
    make = lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9)  # noqa: E731
    weights = on_stages(make, scheduler=schedule)
    assert cases.global_error(weights, one_process(make, schedule)) < cases.TOLERANCE


def test_the_scheduler_waits_for_updates() -> None:
    """Steps that only accumulate, and those that overflow, move no rate; a rank without
    parameters has none to move.
    """
    case = CASES["no parameters first"]
    graph = capture(case.model(), case.batch(3)[0], loss=case.loss)

    def work(trainer: Trainer) -> list[float] | None:
        if trainer.rank == 3:
            parameter = next(iter(trainer.parts.trainable().values()))
            hook = parameter.register_hook(lambda g: g * torch.inf)
        trainer.step(*case.batch(6, 0))
        if trainer.rank == 3:
            hook.remove()
        trainer.step(*case.batch(6, 0), update=False)
        trainer.step(*case.batch(6, 1))
        return None if trainer.scheduler is None else trainer.scheduler.get_last_lr()

    plan = cases.make_plan(graph, (1, 1, 1, 1), 6, 2)
    schedule = lambda o: lr_scheduler.StepLR(o, 1, 0.5)  # noqa: E731
    found = on_ranks(graph, plan, work, scheduler=schedule, precision="fp16")
    assert found == [None, [0.05], [0.05], [0.05]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": lambda p: None}, "optimizer factory returned NoneType; return a torch.opt"),
        ({"scheduler": lambda o: 0.1}, "scheduler factory returned float; return a scheduler"),
        ({"scheduler": lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau wants a metric"),
    ],
)
def test_what_is_no_optimizer_or_scheduler_is_refused(arguments: Any, words: str) -> None:
    """With what to return instead."""
    plan = cases.make_plan(cases.build("mlp"), (1,), 12, 2)
    with pytest.raises(InputError, match=words):
        on_ranks(cases.build("mlp"), plan, lambda trainer: None, **arguments)
