"""Runs a captured model in pieces, in one process, and the whole model beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dapple.graph import LayerGraph
from dapple.runtime.stage import StageRunner


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for inputs as `capture` takes them."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def whole(model: nn.Module, loss: Any, inputs: Any, targets: Any) -> tuple[Tensor, dict[str, Any]]:
    """Loss and gradients of the uncut model."""
    model.zero_grad()
    value = loss(call(model, inputs), targets)
    value.backward()
    return value.detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, Any]:
    """A copy of each parameter's gradient, None where it has none."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def in_stages(graph: LayerGraph, cuts: Sequence[int], inputs: Any, targets: Any) -> Tensor:
    """Forward and backward of the stages between the cuts, as the runtime does them."""
    named = graph.flatten_inputs(inputs)
    rows = graph.batch_size(named)
    edges = [0, *cuts, graph.num_layers]
    runners = [StageRunner(graph.stage(a, b)) for a, b in itertools.pairwise(edges)]
    made: dict[str, Tensor] = {}
    results: tuple[Any, ...] = ()
    for runner in runners:
        received = {t.name: made[t.name].clone() for t in runner.program.reads}
        values, results = runner.forward(0, rows, named, received)
        made |= {t.name: v for t, v in zip(runner.program.makes, values, strict=True)}
    loss = graph.loss_of(graph.unflatten_outputs(results), targets)
    runners[-1].set_loss(0, loss)
    back: dict[str, Tensor] = {}
    for runner in reversed(runners):
        arriving = [back.get(t.name) for t in runner.program.makes]
        for tensor, value in zip(runner.program.reads, runner.backward(0, arriving), strict=True):
            if value is not None:
                known = back.get(tensor.name)
                back[tensor.name] = value if known is None else known + value
    return loss.detach()
