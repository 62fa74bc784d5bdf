"""Parameters that the user freezes while a trainer lives, and those that were frozen before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dapple.errors import InputError
from dapple.graph import capture
from dapple.runtime.trainer import Trainer
from tests.runtime import cases
from tests.runtime.threads import on_ranks

NAMES = ("layers.0.0.weight", "layers.2.0.bias", "layers.5.weight")


def freeze(parameters: Any, frozen: bool) -> None:
    """Freeze some of the parameters in a dict, or let them go again."""
    for name in NAMES:
        if name in parameters:
            parameters[name].requires_grad_(not frozen)


@pytest.mark.parametrize(
    ("replicas", "changes"),
    [
        ((1,), {}),
        ((1, 2), {"schedule": "zero-bubble"}),
        ((2, 1), {"schedule": "interleaved", "virtual": 2}),
        ((2, 2), {"shard": "optimizer"}),
    ],
    ids=["alone", "split", "virtual", "sharded"],
)
def test_freezing_for_a_step_equals_one_process(replicas: Any, changes: Any) -> None:
    """A frozen parameter is neither moved nor decayed; thawed, it goes on."""
    graph, batch = cases.build("mlp"), cases.EXAMPLES["mlp"].batch
    model = cases.make_model("mlp")
    update = cases.OPTIMIZERS["adamw"](list(model.parameters()))
    for step in range(3):
        freeze(dict(model.named_parameters()), step == 1)
        x, y = batch(12, step)
        update.zero_grad()
        cases.squared_error(model(x), y).backward()
        update.step()

    def work(trainer: Trainer) -> Any:
        parameters = trainer.parts.trainable()
        for step in range(3):
            freeze(parameters, step == 1)
            trainer.step(*batch(12, step))
        return {n: v.clone() for n, v in trainer.state_dict().items()}

    plan = cases.make_plan(graph, replicas, 12, 3, **changes)
    states = on_ranks(graph, plan, work, cases.OPTIMIZERS["adamw"])
    assert cases.global_error(states, dict(model.state_dict())) < cases.TOLERANCE


def test_thawing_what_was_frozen_at_first_is_refused() -> None:
    """Its gradients would be neither summed nor used, without a word."""
    model, example = cases.make_model("mlp"), cases.EXAMPLES["mlp"]
    freeze(dict(model.named_parameters()), True)
    graph = capture(model, example.batch(4, 0)[0], loss=example.loss)

    def work(trainer: Trainer) -> None:
        trainer.step(*example.batch(8, 0))
        for program in trainer.parts.training.programs.values():
            program.module.requires_grad_(True)
        with pytest.raises(InputError, match=r'parameter "layers.0.0.weight" was frozen when'):
            trainer.step(*example.batch(8, 1))

    on_ranks(graph, cases.make_plan(graph, (1,), 8, 2), work)


def own_share(trainer: Trainer) -> dict[str, Any]:
    """What its part of a sharded optimizer updates."""
    assert trainer.optimizer is not None
    own = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in trainer.parts.trainable().items() if id(p) in own}


def tied_on_the_last(trainer: Trainer) -> dict[str, Any]:
    """A parameter of the first stage too."""
    name = "embed.weight" if trainer.topology.is_last else "none"
    return {n: p for n, p in trainer.parts.trainable().items() if n == name}


@pytest.mark.parametrize(
    ("model", "replicas", "shard", "chosen", "told"),
    [
        ("mlp", (1, 2), "optimizer", own_share, r"on 1 of the 2 ranks that hold it; freeze"),
        ("gpt", (1, 1), "none", tied_on_the_last, r"on 1 of the 2 ranks that hold it; freeze"),
    ],
    ids=["sharded", "tied"],
)
def test_freezing_on_some_of_the_holders_is_refused(
    model: str, replicas: Any, shard: Any, chosen: Any, told: str
) -> None:
    """By the parameter's name, on every rank; the others would go on and update it."""
    graph, example = cases.build(model), cases.EXAMPLES[model]

    def work(trainer: Trainer) -> None:
        trainer.step(*example.batch(12, 0))
        own = chosen(trainer)
        for parameter in own.values():
            parameter.requires_grad_(False)
        with pytest.raises(InputError, match=rf'parameter ".*" is frozen {told}'):
            trainer.step(*example.batch(12, 1))
        for parameter in own.values():
            parameter.requires_grad_(True)
        trainer.evaluate(*example.batch(12, 1))
        trainer.step(*example.batch(12, 1))

    plan = cases.make_plan(graph, replicas, 12, 2, shard=shard)
    on_ranks(graph, plan, work, weight=example.weight)


@pytest.mark.parametrize("schedule", ["early-backward", "zero-bubble"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_a_step_that_raised_leaves_nothing_to_the_next(micro_batch: int, schedule: str) -> None:
    """A user who catches it, out of memory say, goes on with another batch."""
    graph, batch = cases.build("mlp"), cases.EXAMPLES["mlp"].batch

    def work(fails: bool, trainer: Trainer) -> dict[str, torch.Tensor]:
        if fails:
            trainer.step(*batch(12, 5), update=False)
            calls = iter(range(99))

            def raises(gradient: torch.Tensor) -> None:
                if next(calls) == micro_batch:
                    raise MemoryError

            # In the middle of a backward, when later layers have had theirs.
            hook = trainer.parts.trainable()["layers.1.0.bias"].register_hook(raises)
            with pytest.raises(MemoryError):
                trainer.step(*batch(12, 6))
            hook.remove()
        for step in range(2):
            trainer.step(*batch(8, step))
        assert trainer.runners[0].in_flight == 0
        return {n: v.clone() for n, v in trainer.state_dict().items()}

    plan = cases.make_plan(graph, (1,), 12, 3, schedule)
    (wanted,), (found,) = (on_ranks(graph, plan, lambda t, f=f: work(f, t)) for f in (False, True))
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
