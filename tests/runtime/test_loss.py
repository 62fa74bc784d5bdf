"""The loss of a step: weights, pieces without weight, batches without weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dapple.errors import InputError
from dapple.runtime.trainer import Trainer
from tests.runtime import cases
from tests.runtime.threads import on_ranks


def test_pieces_of_unequal_size_and_weight_count_by_their_weight() -> None:
    """Pitfall 5: batch 10 in 4 micro-batches with unequal numbers of unmasked tokens."""
    example, graph = cases.EXAMPLES["gpt"], cases.build("gpt")
    inputs, targets = example.batch(10, 0)
    wanted = example.loss(cases.make_model("gpt")(inputs), targets).item()
    plan = cases.make_plan(graph, (1, 2), 10, 4)
    weighted = on_ranks(graph, plan, lambda t: t.step(inputs, targets).loss, weight=example.weight)
    assert weighted == pytest.approx([wanted] * 3, rel=1e-12)


def test_a_mean_of_means_would_be_another_loss() -> None:
    """The batch of the test above tells weights from none: a mean of means is off."""
    example = cases.EXAMPLES["gpt"]
    inputs, targets = example.batch(10, 0)
    output = cases.make_model("gpt")(inputs)
    pieces = zip(output.tensor_split(4), targets.tensor_split(4), strict=True)
    losses = torch.stack([example.loss(o, t) for o, t in pieces])
    mean = losses[~losses.isnan()].mean().item()
    assert abs(mean / example.loss(output, targets).item() - 1) > 1e-4


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_batch_without_weight_gives_nan_and_changes_nothing(optimizer: str) -> None:
    """All targets masked: a mean of nothing. Neither momentum nor weight decay goes on anywhere."""
    example, graph = cases.EXAMPLES["gpt"], cases.build("gpt")
    inputs, targets = example.batch(6, 0)
    masked = torch.full_like(targets, -100)

    def work(trainer: Trainer) -> tuple[float, bool, bool]:
        trainer.step(inputs, targets)
        before = {n: v.clone() for n, v in trainer.state_dict().items()}
        result = trainer.step(inputs, masked)
        same = all(torch.equal(v, before[n]) for n, v in trainer.state_dict().items())
        return result.loss, result.skipped, same

    plan = cases.make_plan(graph, (2, 2), 6, 2)
    found = on_ranks(graph, plan, work, cases.OPTIMIZERS[optimizer], weight=example.weight)
    assert all(math.isnan(loss) and skipped and same for loss, skipped, same in found)


def test_a_batch_without_weight_ends_an_accumulation_like_any_other() -> None:
    """What was accumulated before it counts, and not again in the step after."""
    example, graph = cases.EXAMPLES["gpt"], cases.build("gpt")
    inputs, targets = example.batch(6, 0)
    masked = torch.full_like(targets, -100)

    def steps(*batches: tuple[torch.Tensor, bool]) -> Any:
        def work(trainer: Trainer) -> tuple[list[bool], dict[str, torch.Tensor]]:
            skipped = [trainer.step(inputs, t, update=update).skipped for t, update in batches]
            return skipped, {n: v.clone() for n, v in trainer.state_dict().items()}

        plan = cases.make_plan(graph, (2, 1), 6, 2)
        return on_ranks(graph, plan, work, cases.OPTIMIZERS["adamw"], weight=example.weight)

    split = steps((targets, False), (masked, True), (masked, True))
    whole = steps((targets, True))
    for (skipped, one), (_, other) in zip(split, whole, strict=True):
        assert skipped == [False, False, True]
        assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_must_be_numbers(weight: float) -> None:
    """A negative or infinite weight is refused before any forward."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]
    plan = cases.make_plan(graph, (1,), 6, 2)
    with pytest.raises(InputError, match=f"weight of micro-batch 0 is {weight}; weights must be"):
        on_ranks(graph, plan, lambda t: t.step(*example.batch(6, 0)), weight=lambda i, t: weight)


def test_the_loss_is_known_on_every_rank() -> None:
    """Also on ranks that compute none, and on replicas without rows."""
    graph, example = cases.build("skip"), cases.EXAMPLES["skip"]
    plan = cases.make_plan(graph, (2, 3), 12, 4)
    losses = on_ranks(graph, plan, lambda t: t.step(*example.batch(1, 0)).loss)
    assert len(set(losses)) == 1
    assert math.isfinite(losses[0])
