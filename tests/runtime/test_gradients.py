"""The scale of gradients, sums over calls, and tied parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dapple.runtime.trainer import Trainer
from tests.runtime import cases
from tests.runtime.cases import Run
from tests.runtime.threads import OwnCopy, on_ranks, run_threads


def sum_of_gradients(name: str, sizes: list[int]) -> dict[str, Tensor]:
    """Gradients of one process after a backward of each batch."""
    example, model = cases.EXAMPLES[name], cases.make_model(name)
    for step, rows in enumerate(sizes):
        inputs, targets = example.batch(rows, step)
        example.loss(
            model(*(inputs if isinstance(inputs, tuple) else (inputs,))), targets
        ).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    parameters = trainer.parts.trainable()
    return {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("replicas", [(1,), (2, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_gradients_are_those_of_the_mean_over_the_global_batch(
    name: str, replicas: tuple[int, ...], micro_batches: int
) -> None:
    """Pitfall 2: never divided by micro-batches, stages or replicas, nor not divided at all."""
    graph, example = cases.build(name), cases.EXAMPLES[name]

    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(*example.batch(12, 0))
        return gradients(trainer)

    plan = cases.make_plan(graph, replicas, 12, micro_batches)
    found = on_ranks(graph, plan, work, weight=example.weight)
    assert cases.global_error(found, sum_of_gradients(name, [12])) < cases.TOLERANCE


@pytest.mark.parametrize("replicas", [(1, 1), (2, 3)], ids=str)
def test_two_batches_before_an_update_are_two_backwards(replicas: tuple[int, ...]) -> None:
    """Pitfall 3: the first batch's gradients are neither scaled nor summed over replicas again."""
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]

    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(*example.batch(12, 0), update=False)
        trainer.step(*example.batch(5, 1), update=False)
        trainer.step(*example.batch(13, 2))
        return gradients(trainer)

    plan = cases.make_plan(graph, replicas, 12, 4)
    found = on_ranks(graph, plan, work, weight=example.weight)
    assert cases.global_error(found, sum_of_gradients("gpt", [12, 5, 13])) < cases.TOLERANCE


def test_gradients_start_from_zero_after_an_update() -> None:
    """Whether or not the user's loop calls zero_grad(), with either meaning."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]

    def work(clear: Any, trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(*example.batch(12, 0))
        clear(trainer.optimizer)
        trainer.step(*example.batch(12, 1))
        return gradients(trainer)

    plan = cases.make_plan(graph, (2, 1), 12, 2)
    ways = [lambda o: None, lambda o: o.zero_grad(), lambda o: o.zero_grad(set_to_none=False)]
    found = [on_ranks(graph, plan, lambda t, w=way: work(w, t)) for way in ways]
    for other in found[1:]:
        for mine, its in zip(found[0], other, strict=True):
            assert all(torch.equal(value, its[name]) for name, value in mine.items())


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 3), (3, 2, 1)], ids=str)
def test_a_skip_over_a_stage_carries_values_and_gradients(replicas: tuple[int, ...]) -> None:
    """Pitfall 11: from stage 0 straight to stage 2; gradients of both readers are summed."""
    run = Run("skip", replicas, 4, 13, optimizer="sgd", split="early")
    graph = cases.build("skip")
    plan = cases.make_plan(graph, replicas, 13, 4, split="early")
    starts = [stage.start for stage in plan.stages]
    far = [t for t in graph.tensors() if t.producer < starts[1] and t.consumers[-1] >= starts[2]]
    assert [t.needs_grad for t in far] == [True, False]
    results = run_threads(
        sum(replicas), lambda transport: cases.train(OwnCopy(graph), run, transport=transport)
    )
    assert cases.error(run, results) < cases.TOLERANCE


@pytest.mark.parametrize("replicas", [(2, 3), (1, 2, 1), (3, 1)], ids=str)
def test_tied_weights_stay_one_weight(replicas: tuple[int, ...]) -> None:
    """Pitfall 12: embedding and head on stages of unequal replicas, five Adam steps: all copies
    are bitwise equal, and equal one process.
    """
    run = Run("gpt", replicas, 4, 12, (12,) * 5)
    graph = cases.build("gpt")
    results = run_threads(
        sum(replicas), lambda transport: cases.train(OwnCopy(graph), run, transport=transport)
    )
    assert cases.error(run, results) < cases.TOLERANCE
    copies = [state["embed.weight"] for state, _ in results if "embed.weight" in state]
    assert len(copies) == replicas[0] + replicas[-1]
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    heads = [state["head.weight"] for state, _ in results if "head.weight" in state]
    assert all(torch.equal(head, copies[0]) for head in heads)


def test_replicas_stay_bitwise_equal() -> None:
    """Replicas of a stage never drift apart, also when some have no rows."""
    run = Run("skip", (3, 2), 2, 12, (12, 1, 5, 13))
    graph = cases.build("skip")
    states = [
        state
        for state, _ in run_threads(
            5, lambda transport: cases.train(OwnCopy(graph), run, transport=transport)
        )
    ]
    for group in (states[:3], states[3:]):
        for other in group[1:]:
            assert all(torch.equal(value, other[name]) for name, value in group[0].items())
