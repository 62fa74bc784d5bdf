"""Models with awkward traits train like one process, and evaluate like it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from tests.graph import checks
from tests.graph.models import CASES, Case
from tests.runtime.cases import TOLERANCE, global_error, make_plan
from tests.runtime.threads import on_ranks

ROWS, EVALUATION_ROWS, STEPS = 7, 5, 3
# The LSTM's export is slow and adds nothing here. Batch norm has tests of its own below.
NAMES = [name for name in CASES if name not in ("recurrent", "normed", "gpt", "mlp", "skip")]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@functools.cache
def captured(name: str) -> LayerGraph:
    case = CASES[name]
    return capture(case.model(), case.batch(3)[0], loss=case.loss, name=name)


@functools.cache
def reference(name: str) -> tuple[dict[str, Tensor], float]:
    """Weights after the steps, and the loss in evaluation, of one process."""
    case = CASES[name]
    model = case.model()
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = case.batch(ROWS, step)
        case.loss(checks.call(model, inputs), targets).backward()
        optimizer.step()
    model.eval()
    inputs, targets = case.batch(EVALUATION_ROWS, STEPS)
    loss = case.loss(checks.call(model, inputs), targets).item()
    return {n: v.detach() for n, v in model.state_dict().items()}, loss


def train_and_evaluate(case: Case, trainer: Trainer) -> tuple[dict[str, Tensor], float]:
    for step in range(STEPS):
        trainer.step(*case.batch(ROWS, step))
    return trainer.state_dict(), trainer.evaluate(*case.batch(EVALUATION_ROWS, STEPS))


@pytest.mark.parametrize("replicas", [(2, 3), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_evaluation_equal_one_process(name: str, replicas: tuple[int, ...]) -> None:
    """Whatever crosses the cuts, replicas of unequal number train and evaluate as one process.

    Pitfall 15: stages that are frozen or have no parameters. Pitfall 16: ints and bools cross.
    """
    graph, case = captured(name), CASES[name]
    if graph.num_layers < len(replicas):
        replicas = (2, 1)
    plan = make_plan(graph, replicas, ROWS, 3)
    results = on_ranks(graph, plan, functools.partial(train_and_evaluate, case), adam)
    weights, loss = reference(name)
    assert global_error([state for state, _ in results], weights) < TOLERANCE
    assert [found for _, found in results] == pytest.approx([loss] * len(results), rel=TOLERANCE)


def test_a_stage_without_parameters() -> None:
    """Pitfall 15: its rank has nothing to optimise and takes part all the same."""
    graph = captured("no parameters first")
    plan = make_plan(graph, [1, 2, 1, 1], ROWS, 3)
    states = on_ranks(graph, plan, lambda t: train_and_evaluate(CASES[graph.name], t)[0], adam)
    assert states[0] == {}
    assert global_error(states, reference(graph.name)[0]) < TOLERANCE


def test_a_frozen_stage_keeps_no_gradients_and_no_optimizer() -> None:
    """Pitfall 15: all layers of a stage frozen."""
    graph = captured("frozen middle")
    plan = make_plan(graph, [1, 1, 1], ROWS, 2)

    def work(trainer: Trainer) -> tuple[bool, dict[str, Tensor]]:
        trained = train_and_evaluate(CASES[graph.name], trainer)
        return trainer.optimizer is None, trained[0]

    results = on_ranks(graph, plan, work, adam)
    assert [frozen for frozen, _ in results] == [False, True, False]
    assert global_error([state for _, state in results], reference(graph.name)[0]) < TOLERANCE


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("schedule", ["early-backward", "gpipe"])
def test_running_statistics_are_updated_once_per_micro_batch(
    replicas: tuple[int, ...], schedule: str
) -> None:
    """Pitfall 13: as one process that takes the micro-batches one after the other."""
    case, graph = CASES["normed"], captured("normed")
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = case.batch(8, step)
        for x, y in zip(inputs.tensor_split(3), targets.tensor_split(3), strict=True):
            (case.loss(model(x), y) * len(x) / 8).backward()
        optimizer.step()
    wanted = model.state_dict()
    inputs, targets = case.batch(EVALUATION_ROWS, 9)
    loss = case.loss(model.eval()(inputs), targets).item()

    def work(trainer: Trainer) -> tuple[dict[str, Tensor], float]:
        for step in range(STEPS):
            trainer.step(*case.batch(8, step))
        return trainer.state_dict(), trainer.evaluate(inputs, targets)

    plan = make_plan(graph, replicas, 8, 3, schedule)
    results = on_ranks(graph, plan, work)
    assert global_error([state for state, _ in results], wanted) < TOLERANCE
    found = {n: v for state, _ in results for n, v in state.items()}
    assert int(found["layers.2.1.num_batches_tracked"]) == 3 * STEPS
    assert [value for _, value in results] == pytest.approx([loss] * len(results), rel=TOLERANCE)


def test_devices_in_any_order() -> None:
    """A plan may put later stages on lower devices: ranks are devices in ascending order."""
    graph = captured("two names")
    plan = make_plan(graph, [2, 1], ROWS, 3)
    first, last = plan.stages
    stages = (
        first.model_copy(update={"devices": (2, 1)}),
        last.model_copy(update={"devices": (0,)}),
    )
    plan = plan.model_copy(update={"stages": stages})
    results = on_ranks(graph, plan, functools.partial(train_and_evaluate, CASES["two names"]), adam)
    assert global_error([state for state, _ in results], reference("two names")[0]) < TOLERANCE
    assert set(results[0][0]) == {
        "layers.0.weight",
        "layers.2.weight",
        "layers.2.bias",
        "layers.3.weight",
        "layers.3.bias",
    }


def test_inputs_without_rows_reach_every_piece_whole() -> None:
    """A table that all rows share is an input too, and is never cut."""

    class WithTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)) @ table)

    torch.manual_seed(0)
    model = WithTable().double()
    table = torch.randn(6, 6, dtype=torch.float64)
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    graph = capture(
        model, (torch.randn(3, 6, dtype=torch.float64), table), loss=nn.functional.mse_loss
    )
    wanted = nn.functional.mse_loss(model(x, table), y).item()
    plan = make_plan(graph, [2, 1], 6, 3)
    losses = on_ranks(graph, plan, lambda trainer: trainer.step((x, table), y).loss)
    assert losses == pytest.approx([wanted] * 3, rel=1e-12)
