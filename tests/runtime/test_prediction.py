"""Outputs of a whole batch on every rank, and metrics beside the loss."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from dapple.errors import InputError
from dapple.graph import capture
from dapple.runtime import Evaluation
from dapple.runtime.trainer import Trainer
from tests.runtime import cases
from tests.runtime.cases import TOLERANCE
from tests.runtime.test_evaluation import Counting, snapshot
from tests.runtime.threads import on_ranks


class ManyOutputs(nn.Module):
    """Rows in the first and in the second dimension, whole numbers, bools, a mean and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = torch.tanh(self.layers[0](x))
        y = early
        for layer in self.layers[1:]:
            y = torch.tanh(layer(y))
        return {
            "late": [y, y.transpose(0, 1)],
            "early": early,
            "best": (y.argmax(1), y > 0),
            "mean": y.square().mean(),
            "kind": "many",
            "none": None,
        }


def many() -> nn.Module:
    torch.manual_seed(3)
    return ManyOutputs().double()


def total(output: dict[str, Any], targets: Any) -> Tensor:
    return output["late"][0].square().mean()


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("replicas", [(1,), (2, 3), (1, 2, 1)], ids=str)
def test_outputs_of_the_whole_batch_in_order_on_every_rank(
    rows: int, replicas: tuple[int, ...]
) -> None:
    """In the model's own structure, also for replicas without rows."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1)).double()
    wanted = many().eval()(x)
    graph = capture(many(), torch.randn(4, 6).double(), loss=total)
    plan = cases.make_plan(graph, replicas, 7, 3)
    for found in on_ranks(graph, plan, lambda trainer: trainer.predict(x)):
        assert pytree.tree_structure(found) == pytree.tree_structure(wanted)
        for mine, its in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
            if isinstance(its, Tensor):
                assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
                assert (mine.double() - its.double()).abs().max() < TOLERANCE
            else:
                assert mine == its


def test_prediction_touches_nothing() -> None:
    """Pending gradients, buffers, random state, weights and moments are bitwise the same."""
    torch.manual_seed(0)
    graph = capture(Counting().double(), torch.randn(3, 6).double(), loss=F.mse_loss)
    inputs = torch.randn(8, 6).double()

    def work(trainer: Trainer) -> tuple[list[Tensor], list[Tensor]]:
        trainer.step(inputs, inputs)
        trainer.step(inputs, inputs, update=False)
        before = snapshot(trainer)
        trainer.predict(inputs)
        return before, snapshot(trainer)

    plan = cases.make_plan(graph, (1,), 8, 2)
    ((before, after),) = on_ranks(graph, plan, work, lambda p: torch.optim.AdamW(p))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_outputs_travel_bit_by_bit() -> None:
    """Also negative zeros and NaN, in bf16."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return -torch.relu(x)

    odd = Odd()
    for layer in odd.layers:
        nn.init.eye_(layer.weight)
    x = torch.tensor([[1.0, -1.0], [-2.0, 3.0], [0.0, torch.nan]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = odd(x).detach()
    assert bool((wanted.signbit() & (wanted == 0)).any())
    graph = capture(copy.deepcopy(odd), x, loss=F.mse_loss)
    plan = cases.make_plan(graph, (1, 2), 3, 2)
    for found in on_ranks(graph, plan, lambda t: t.predict(x), precision="bf16"):
        assert found.dtype == wanted.dtype
        assert torch.equal(found.isnan(), wanted.isnan())
        same = found.view(torch.int16) == wanted.view(torch.int16)
        assert bool((same | wanted.isnan()).all())


def test_rows_that_are_flattened_away_are_refused() -> None:
    """On every rank, before any forward."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.reshape(-1, 3)

    graph = capture(Flat(), torch.randn(4, 6), loss=lambda o, t: o.square().mean())
    plan = cases.make_plan(graph, (1, 1), 4, 2)
    refused = []

    def work(trainer: Trainer) -> None:
        with pytest.raises(InputError) as refusal:
            trainer.predict(torch.randn(4, 6))
        refused.append(str(refusal.value))

    on_ranks(graph, plan, work)
    assert len(refused) == 2
    assert "output 0 of the model can't be put together from pieces" in refused[0]


def accuracy(output: Tensor, targets: Tensor) -> float:
    """Of the tokens that count."""
    keep = targets >= 0
    return (output.argmax(-1) == targets)[keep].double().mean().item()


def spread(output: Tensor, targets: Tensor) -> Tensor:
    keep = targets >= 0
    return output.max(-1).values[keep].mean()


METRICS = {"accuracy": accuracy, "spread": spread}


@pytest.mark.parametrize("replicas", [(1,), (2, 3), (1, 2, 1)], ids=str)
def test_metrics_are_weighted_like_the_loss(replicas: tuple[int, ...]) -> None:
    """Pieces of unequal numbers of unmasked tokens, some of none: as on the whole batch, on every
    rank, from evaluation and from a step.
    """
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]
    inputs, targets = example.batch(10, 0)
    output = cases.make_model("gpt")(inputs).detach()
    wanted = {name: float(metric(output, targets)) for name, metric in METRICS.items()}
    loss = example.loss(output, targets).item()

    def work(trainer: Trainer) -> Any:
        evaluated = trainer.evaluate(inputs, targets)
        stepped = trainer.step(inputs, targets, metrics=True)
        return float(evaluated), evaluated.metrics, stepped.metrics, trainer.step(inputs, targets)

    plan = cases.make_plan(graph, replicas, 10, 4)
    for found in on_ranks(graph, plan, work, weight=example.weight, metrics=METRICS):
        assert found[0] == pytest.approx(loss, rel=1e-12)
        assert found[1] == pytest.approx(wanted, rel=1e-12)
        assert found[2] == pytest.approx(wanted, rel=1e-12)
        assert found[3].metrics == {}


def test_metrics_of_a_batch_without_weight_are_nan() -> None:
    """Like its loss: a mean of nothing."""
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]
    inputs, targets = example.batch(6, 0)
    masked = torch.full_like(targets, -100)
    plan = cases.make_plan(graph, (1, 2), 6, 2)
    work = lambda t: t.evaluate(inputs, masked).metrics  # noqa: E731
    found = on_ranks(graph, plan, work, weight=example.weight, metrics=METRICS)
    assert [sorted(m) for m in found] == [["accuracy", "spread"]] * 3
    assert all(value != value for m in found for value in m.values())


def test_a_metric_that_is_no_number_is_refused() -> None:
    """With what it returned, and its name."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]
    plan = cases.make_plan(graph, (1,), 12, 2)
    with pytest.raises(InputError, match=r'metric "all" returned \[6, 4\] instead of a number'):
        on_ranks(
            graph,
            plan,
            lambda t: t.evaluate(*example.batch(12, 0)),
            metrics={"all": lambda o, t: o},
        )


def test_an_evaluation_is_a_number_that_can_be_copied() -> None:
    """To other processes too, with its metrics."""
    found = Evaluation(0.5, {"accuracy": 0.25})
    for one in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (one, one.metrics, f"{one:.2f}") == (0.5, {"accuracy": 0.25}, "0.50")
