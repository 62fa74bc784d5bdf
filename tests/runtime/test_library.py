"""Library models, as they are, train in a pipeline with unequal replicas like one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from dapple.runtime.watch import NoWatch
from tests.graph import checks
from tests.runtime.cases import global_error, make_plan
from tests.runtime.library import MODELS
from tests.runtime.threads import TrainingOnly, run_threads

ROWS, MICRO_BATCHES = 7, 3
TOLERANCE = 1e-10


@functools.cache
def captured(name: str) -> LayerGraph:
    model = MODELS[name]
    example = model.batch(3, 0)[0]
    return capture(model.make(), example, loss=model.loss, name=name, evaluation=False)


def descend(parameters: Any) -> torch.optim.Optimizer:
    """A step of length one, so that an error of a gradient is one of a parameter."""
    return torch.optim.SGD(parameters, lr=1.0)


def one_process(name: str) -> tuple[dict[str, Tensor], float]:
    """State and loss after a step of one process that takes micro-batch after micro-batch."""
    model = MODELS[name]
    module = model.make()
    optimizer = descend(module.parameters())
    pieces = [model.batch(ROWS, 1)] if model.weight else _pieces(*model.batch(ROWS, 1))
    total = 0.0
    for inputs, targets in pieces:
        output = checks.call(module, inputs)
        loss = output.loss if model.loss is None else model.loss(output, targets)
        share = loss * (_rows(inputs) / ROWS)
        share.backward()
        total += share.item()
    optimizer.step()
    return {n: v.detach() for n, v in module.state_dict().items()}, total


def _rows(inputs: Any) -> int:
    values = list(inputs.values()) if isinstance(inputs, dict) else inputs
    return len(values[0] if isinstance(values, list | tuple) else values)


def _pieces(inputs: Any, targets: Any) -> list[tuple[Any, Any]]:
    def cut(value: Any) -> list[Any]:
        if isinstance(value, dict):
            rows = [cut(v) for v in value.values()]
            return [dict(zip(value, row, strict=True)) for row in zip(*rows, strict=True)]
        if isinstance(value, tuple):
            return list(zip(*(cut(v) for v in value), strict=True))
        return list(value.tensor_split(MICRO_BATCHES))

    cuts = [None] * MICRO_BATCHES if targets is None else cut(targets)
    return list(zip(cut(inputs), cuts, strict=True))


def train_rank(name: str, replicas: tuple[int, ...], transport: Any = None) -> Any:
    """State and loss of this rank after a step of a plan."""
    graph, model = captured(name), MODELS[name]
    trainer = Trainer(
        TrainingOnly(graph),  # type: ignore[arg-type]
        make_plan(graph, replicas, ROWS, MICRO_BATCHES),
        descend,
        weight=model.weight,
        transport=transport,
        watch=NoWatch(),
        device=torch.device("cpu"),
        record=False,
    )
    loss = trainer.step(*model.batch(ROWS, 1)).loss
    return {n: v.clone() for n, v in trainer.state_dict().items()}, loss


def train(name: str, replicas: tuple[int, ...]) -> list[tuple[dict[str, Tensor], float]]:
    """State and loss of each rank, ranks as threads."""
    return run_threads(sum(replicas), functools.partial(train_rank, name, replicas))


@pytest.mark.parametrize("name", list(MODELS))
def test_a_step_in_three_stages_equals_one_process(name: str) -> None:
    """Replicas 2, 1 and 3, micro-batches of 3, 2 and 2 rows: gradients, buffers and loss."""
    assert captured(name).num_layers == MODELS[name].layers
    results = train(name, (2, 1, 3))
    state, loss = one_process(name)
    assert global_error([found for found, _ in results], state) < TOLERANCE
    assert [value for _, value in results] == pytest.approx([loss] * len(results), rel=TOLERANCE)


def test_a_cache_in_the_output_is_left_out_and_said() -> None:
    """What export knows nothing of, and no training reads, is no obstacle."""
    assert [note for note in captured("gpt2").notes if "left out: DynamicCache" in note]
