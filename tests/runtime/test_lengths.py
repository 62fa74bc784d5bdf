"""Sequences whose length changes from step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dapple.errors import CaptureError, InputError
from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from dapple.zoo.gpt import GPT, next_byte_loss, unmasked_tokens
from tests.runtime import cases
from tests.runtime.threads import on_ranks, sgd

LENGTHS = (7, 3, 12, 1, 7)


def model() -> nn.Module:
    torch.manual_seed(7)
    return GPT(vocab=16, width=8, layers=4, heads=2, context=12).double()


def batch(step: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    length = LENGTHS[step]
    tokens = torch.randint(0, 16, (rows, length), generator=g)
    targets = torch.randint(0, 16, (rows, length), generator=g)
    targets[:, 0].masked_fill_(torch.rand(rows, generator=g) < 0.4, -100)
    return tokens, targets


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    example = torch.zeros(4, 5, dtype=torch.int64)
    return capture(model(), example, loss=next_byte_loss, lengths={0: {1: "length"}})


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of one process."""
    one, losses = model(), []
    optimizer = sgd(one.parameters())
    for step in range(len(LENGTHS)):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = next_byte_loss(one(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {n: v.detach() for n, v in one.state_dict().items()}, losses


@pytest.mark.parametrize(("replicas", "recompute"), [((2, 3), False), ((1, 2, 1), True)], ids=str)
def test_another_length_at_each_step_trains_as_on_one_process(
    replicas: tuple[int, ...], recompute: bool, graph: LayerGraph, reference: Any
) -> None:
    """Values and gradients of any length cross the cuts; evaluation and prediction take them too."""
    plan = cases.make_plan(graph, replicas, 6, 3)
    stages = [stage.model_copy(update={"recompute": recompute}) for stage in plan.stages]
    plan = plan.model_copy(update={"stages": tuple(stages)})

    def work(trainer: Trainer) -> Any:
        losses = [trainer.step(*batch(step)).loss for step in range(len(LENGTHS))]
        evaluated = float(trainer.evaluate(*batch(2, rows=5)))
        return trainer.state_dict(), losses, evaluated, trainer.predict(batch(1)[0])

    weights, losses = reference
    one = model()
    one.load_state_dict(weights)
    with torch.no_grad():
        inputs, targets = batch(2, rows=5)
        wanted = next_byte_loss(one.eval()(inputs), targets).item()
        output = one(batch(1)[0])
    results = on_ranks(graph, plan, work, weight=unmasked_tokens)
    assert cases.global_error([r[0] for r in results], weights) < cases.TOLERANCE
    for _, found, evaluated, predicted in results:
        assert found == pytest.approx(losses, rel=1e-10)
        assert evaluated == pytest.approx(wanted, rel=1e-10)
        assert (predicted - output).abs().max() < cases.TOLERANCE


def test_lengths_that_the_ranks_do_not_share_are_refused(graph: LayerGraph) -> None:
    """On every rank, with the length here."""
    refused = []

    def work(trainer: Trainer) -> None:
        with pytest.raises(InputError) as refusal:
            trainer.step(*batch(trainer.rank))
        refused.append(str(refusal.value))

    on_ranks(graph, cases.make_plan(graph, (1, 1), 6, 2), work)
    assert sorted(text.split(":")[1].split(",")[0] for text in refused) == [
        " 3 length here",
        " 7 length here",
    ]


def test_inputs_with_one_name_and_two_lengths_are_refused() -> None:
    """Named with both."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) * scale
            return x

    example = {"x": torch.randn(4, 5, 3), "scale": torch.randn(4, 5, 1)}
    lengths = {"x": {1: "words"}, "scale": {1: "words"}}
    graph = capture(Two(), example, loss=lambda o, t: o.mean(), lengths=lengths)
    wrong = {"x": torch.randn(4, 6, 3), "scale": torch.randn(4, 2, 1)}
    plan = cases.make_plan(graph, (1,), 4, 2)
    with pytest.raises(InputError, match=r'"words" is \d in dimension 1 of input'):
        on_ranks(graph, plan, lambda t: t.step(wrong))


def test_a_shape_that_was_not_named_is_refused() -> None:
    """With the way to name it."""
    fixed = capture(model(), torch.zeros(4, 5, dtype=torch.int64), loss=next_byte_loss)
    plan = cases.make_plan(fixed, (1,), 6, 2)
    words = r"captured for \[batch, 5\]; .*name what changes in capture's `lengths`"
    with pytest.raises(InputError, match=words):
        on_ranks(fixed, plan, lambda t: t.step(*batch(0)))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ({"x": {1: "length"}}, "lengths names 'x', but the arguments are"),
        ({0: {0: "length"}}, "name dimensions from 1, the first is the batch"),
        ({0: {1: "a length"}}, "name dimensions from 1"),
        ({0: {5: "length"}}, "which has 2"),
        ({0: {1: "length"}}, "takes one length only where lengths names length: .*constant"),
    ],
)
def test_lengths_that_can_not_be_are_refused(lengths: Any, words: str) -> None:
    """Also one that the model fixes: a linear layer takes one width."""
    with pytest.raises(CaptureError, match=words):
        capture(nn.Linear(6, 6), torch.randn(4, 6), loss=lambda o, t: o.mean(), lengths=lengths)


def test_lengths_are_not_compiled(graph: LayerGraph) -> None:
    """Refused by the stage's number."""
    with pytest.raises(InputError, match="stage 0 runs with lengths that change, which can't be"):
        on_ranks(graph, cases.make_plan(graph, (1,), 6, 2), lambda t: None, compile=True)
