"""Evaluation gives the loss in evaluation mode and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dapple.graph import capture
from dapple.runtime.trainer import Trainer
from tests.graph.models import CASES, Dropped
from tests.runtime import cases
from tests.runtime.threads import on_ranks


class Counting(nn.Module):
    """Counts its calls in a buffer, in evaluation mode too, and draws random numbers always."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.dropout(torch.tanh(self.layers[0](x)), 0.5, training=True)
        return self.layers[1](self.norm(x))


def snapshot(trainer: Trainer) -> list[Tensor]:
    """All that a step leaves behind on a rank: weights, buffers, gradients, moments, random state."""
    values = list(trainer.parts.tensors())
    for program in trainer.parts.evaluation.programs.values():
        values += [*program.module.parameters(), *program.module.buffers()]
    values += [p.grad for p in trainer.parts.trainable().values() if p.grad is not None]
    values += trainer._gradients.buffers()
    for state in trainer.optimizer.state.values():
        values += [v for v in state.values() if isinstance(v, Tensor)]
    return [v.detach().clone() for v in values] + [torch.get_rng_state()]


def test_evaluation_touches_nothing() -> None:
    """Pitfall 4: pending gradients, buffers, random state and weights are bitwise the same."""
    torch.manual_seed(0)
    graph = capture(Counting().double(), torch.randn(3, 6).double(), loss=F.mse_loss)
    inputs, targets = CASES["normed"].batch(8)

    def work(trainer: Trainer) -> tuple[list[Tensor], list[Tensor]]:
        trainer.step(inputs, targets)
        trainer.step(inputs, targets, update=False)
        before = snapshot(trainer)
        trainer.evaluate(inputs, targets)
        return before, snapshot(trainer)

    plan = cases.make_plan(graph, (1,), 8, 2)
    ((before, after),) = on_ranks(graph, plan, work, lambda p: torch.optim.AdamW(p))
    assert len(before) > 20
    assert any(v.numel() == 1 and v.item() == 4 for v in before[:-1])  # calls: 2 steps, M = 2
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("rows", [1, 5, 12, 40])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 3), (1, 2, 1)], ids=str)
def test_evaluation_takes_any_batch_size(rows: int, replicas: tuple[int, ...]) -> None:
    """The loss of one process on the same rows."""
    example, graph = cases.EXAMPLES["gpt"], cases.build("gpt")
    inputs, targets = example.batch(rows, 3)
    wanted = example.loss(cases.make_model("gpt").eval()(inputs), targets).item()
    plan = cases.make_plan(graph, replicas, 12, 5)
    found = on_ranks(graph, plan, lambda t: t.evaluate(inputs, targets), weight=example.weight)
    assert found == pytest.approx([wanted] * len(found), rel=1e-12)


def test_training_goes_on_after_evaluation_as_if_there_had_been_none() -> None:
    """Steps with evaluations between and before them give the same weights, bitwise."""
    example, graph = cases.EXAMPLES["skip"], cases.build("skip")

    def work(evaluate: bool, trainer: Trainer) -> dict[str, Any]:
        for step in range(2):
            if evaluate:
                trainer.evaluate(*example.batch(7, 8))
            trainer.step(*example.batch(12, step))
        return trainer.state_dict()

    plan = cases.make_plan(graph, (2, 1), 12, 4)
    plain, other = (
        on_ranks(graph, plan, lambda t, e=evaluate: work(e, t)) for evaluate in (False, True)
    )
    for mine, its in zip(plain, other, strict=True):
        assert all(torch.equal(value, its[name]) for name, value in mine.items())


def test_dropout_is_off_in_evaluation() -> None:
    """Two evaluations give one number, that of the plain model."""
    torch.manual_seed(0)
    model = Dropped().double()
    graph = capture(model, torch.randn(3, 6).double(), loss=F.mse_loss)
    inputs, targets = CASES["normed"].batch(8)
    wanted = F.mse_loss(model.eval()(inputs), targets).item()
    plan = cases.make_plan(graph, (2, 1), 8, 2)
    found = on_ranks(graph, plan, lambda t: [t.evaluate(inputs, targets) for _ in range(2)])
    assert torch.tensor(found).tolist() == [pytest.approx([wanted] * 2, rel=1e-6)] * 3
    assert all(first == second for first, second in found)
