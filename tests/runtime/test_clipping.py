"""Clipping by the norm over the whole model: as `clip_grad_norm_` on one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dapple.errors import InputError, RunError
from dapple.graph import capture
from dapple.runtime.trainer import Trainer
from tests.graph import checks
from tests.graph.models import CASES
from tests.runtime import cases
from tests.runtime.threads import on_ranks, sgd

STEPS = 3


def one_process(model: Any, batches: Any, loss: Any, clip_norm: float, p: float) -> Any:
    """Weights and norms of a plain loop with torch's own clipping."""
    optimizer = sgd(model.parameters())
    norms = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(checks.call(model, inputs), targets).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm, p)))
        optimizer.step()
    return {n: v.detach() for n, v in model.state_dict().items()}, norms


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, 0.5, math.inf])
@pytest.mark.parametrize("replicas", [(2, 3), (1, 2, 1)], ids=str)
def test_the_norm_is_that_of_the_whole_model(p: float, replicas: tuple[int, ...]) -> None:
    """Pitfall 14: tied weights on two stages count once, replicas too; any p."""
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]
    batches = [example.batch(12, step) for step in range(STEPS)]
    clip = {0.5: 50.0, 1.0: 5.0}.get(p, 0.05)
    wanted, norms = one_process(cases.make_model("gpt"), batches, example.loss, clip, p)
    assert min(norms) > clip

    def work(trainer: Trainer) -> tuple[dict[str, Tensor], list[float]]:
        found = [trainer.step(*batch).gradient_norm for batch in batches]
        return trainer.state_dict(), found

    plan = cases.make_plan(graph, replicas, 12, 4)
    results = on_ranks(graph, plan, work, weight=example.weight, clip_norm=clip, norm_type=p)
    assert cases.global_error([state for state, _ in results], wanted) < cases.TOLERANCE
    assert [found for _, found in results] == [pytest.approx(norms, rel=1e-10)] * len(results)


@pytest.mark.parametrize("name", ["no parameters first", "frozen middle"])
def test_ranks_with_nothing_to_train_take_part(name: str) -> None:
    """A stage without parameters, and a frozen one, know the norm of the others."""
    case = CASES[name]
    graph = capture(case.model(), case.batch(3)[0], loss=case.loss)
    batches = [case.batch(7, step) for step in range(STEPS)]
    wanted, norms = one_process(case.model(), batches, case.loss, 0.1, 2.0)

    def work(trainer: Trainer) -> tuple[dict[str, Tensor], list[float]]:
        return trainer.state_dict(), [trainer.step(*b).gradient_norm for b in batches]

    replicas = [1] * min(graph.num_layers, 4)
    plan = cases.make_plan(graph, replicas, 7, 2)
    results = on_ranks(graph, plan, work, clip_norm=0.1)
    assert cases.global_error([state for state, _ in results], wanted) < cases.TOLERANCE
    assert [found for _, found in results] == [pytest.approx(norms, rel=1e-10)] * len(results)


@pytest.mark.parametrize(
    ("shard", "schedule", "virtual"),
    [("optimizer", "early-backward", 1), ("none", "interleaved", 2), ("none", "zero-bubble", 1)],
)
def test_shares_and_virtual_stages_clip_by_the_same_norm(
    shard: str, schedule: str, virtual: int
) -> None:
    """Whoever updates a parameter, and however many stages a rank has, each counts once."""
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]
    batches = [example.batch(12, step) for step in range(STEPS)]
    wanted, norms = one_process(cases.make_model("gpt"), batches, example.loss, 0.05, 2.0)

    def work(trainer: Trainer) -> tuple[dict[str, Tensor], list[float]]:
        found = [trainer.step(*batch).gradient_norm for batch in batches]
        return trainer.state_dict(), found

    plan = cases.make_plan(graph, (2, 3), 12, 4, schedule, virtual=virtual)
    stages = tuple(stage.model_copy(update={"shard": shard}) for stage in plan.stages)
    plan = plan.model_copy(update={"stages": stages})
    results = on_ranks(graph, plan, work, weight=example.weight, clip_norm=0.05)
    assert cases.global_error([state for state, _ in results], wanted) < cases.TOLERANCE
    assert [found for _, found in results] == [pytest.approx(norms, rel=1e-10)] * len(results)


def test_gradients_below_the_limit_stay_bitwise_as_they_are() -> None:
    """An infinite limit only measures."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]

    def work(trainer: Trainer) -> tuple[dict[str, Tensor], float | None]:
        norm = trainer.step(*example.batch(12, 0)).gradient_norm
        return trainer.state_dict(), norm

    plan = cases.make_plan(graph, (2, 1), 12, 2)
    plain = on_ranks(graph, plan, work)
    measured = on_ranks(graph, plan, work, clip_norm=math.inf)
    assert [norm for _, norm in plain] == [None] * 3
    assert all(norm > 0 for _, norm in measured)
    for (mine, _), (its, _) in zip(plain, measured, strict=True):
        assert all(torch.equal(value, its[name]) for name, value in mine.items())


def test_the_norm_is_of_the_sum_over_accumulated_batches() -> None:
    """A step that only accumulates has none."""
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]
    model = cases.make_model("gpt")
    for step in range(2):
        inputs, targets = example.batch(12, step)
        example.loss(model(inputs), targets).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()

    def work(trainer: Trainer) -> list[float | None]:
        first = trainer.step(*example.batch(12, 0), update=False).gradient_norm
        return [first, trainer.step(*example.batch(12, 1)).gradient_norm]

    plan = cases.make_plan(graph, (1, 2), 12, 2)
    found = on_ranks(graph, plan, work, weight=example.weight, clip_norm=1.0)
    assert found == [[None, pytest.approx(wanted, rel=1e-10)]] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_an_error_where_asked_for(value: float) -> None:
    """On every rank, also those whose own gradients are finite, and no weight changes."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]

    def work(trainer: Trainer) -> bool:
        before = {n: v.clone() for n, v in trainer.state_dict().items()}
        if trainer.rank == 0:
            # A gradient that becomes infinite on one rank only: stage 0's first parameter.
            first = next(iter(trainer.parts.trainable().values()))
            first.register_hook(lambda g: g * value)
        with pytest.raises(RunError, match=r"norm of order 2 is (nan|inf); .*error_if_nonfinite"):
            trainer.step(*example.batch(12, 0))
        return all(torch.equal(v, before[n]) for n, v in trainer.state_dict().items())

    plan = cases.make_plan(graph, (1, 1), 12, 2)
    assert on_ranks(graph, plan, work, clip_norm=1.0, error_if_nonfinite=True) == [True] * 2


def test_a_norm_that_is_nan_spoils_all_gradients_as_in_torch() -> None:
    """Without the error every rank's weights are NaN afterwards, and nobody goes on unnoticed."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]

    def work(trainer: Trainer) -> tuple[bool, bool]:
        if trainer.rank == 0:
            next(iter(trainer.parts.trainable().values())).register_hook(lambda g: g * math.nan)
        norm = trainer.step(*example.batch(12, 0)).gradient_norm
        values = trainer.state_dict().values()
        return math.isnan(norm), all(bool(v.isnan().all()) for v in values)

    plan = cases.make_plan(graph, (1, 1), 12, 2)
    assert on_ranks(graph, plan, work, clip_norm=1.0) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clip_norm": 0.0}, "clip_norm is 0.0; pass a number above 0"),
        ({"clip_norm": math.nan}, "clip_norm is nan"),
        ({"clip_norm": 1.0, "norm_type": 0.0}, "norm_type is 0.0"),
        ({"clip_norm": 1.0, "norm_type": -1.0}, "norm_type is -1.0"),
    ],
)
def test_limits_and_norms_are_positive(arguments: dict[str, float], words: str) -> None:
    """Zero, negative and NaN are refused before anything trains."""
    plan = cases.make_plan(cases.build("mlp"), (1,), 12, 2)
    with pytest.raises(InputError, match=words):
        on_ranks(cases.build("mlp"), plan, lambda trainer: None, **arguments)
