"""Dropout: masks depend on seed, step, micro-batch and row, and are repeatable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from tests.graph.models import Dropped
from tests.runtime import cases
from tests.runtime.threads import on_ranks


class Seen:
    """A loss function that notes the outputs that it gets, but not the halves of the first check."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        if output.shape[0] == 4:
            self.outputs.append(output.detach().clone())
        return output.square().mean()


def captured(seen: Seen) -> LayerGraph:
    torch.manual_seed(0)
    return capture(Dropped().double(), torch.randn(3, 6).double(), loss=seen)


def outputs(steps: int = 2, **arguments: Any) -> list[Tensor]:
    """What two steps of two micro-batches of equal rows give on one rank."""
    seen = Seen()
    graph = captured(seen)

    def work(trainer: Trainer) -> None:
        for _ in range(steps):
            torch.rand(3)  # what others draw in between must not matter
            trainer.step(torch.ones(8, 6).double())

    frozen = lambda p: torch.optim.SGD(p, lr=0.0)  # noqa: E731
    on_ranks(graph, cases.make_plan(graph, (1,), 8, 2), work, frozen, **arguments)
    return seen.outputs


def test_the_same_seed_repeats_bitwise() -> None:
    """The same plan and seed give the same masks, whatever the state of the global generator."""
    torch.manual_seed(1)
    first = outputs(seed=5)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, outputs(seed=5), strict=True))


def test_steps_micro_batches_and_seeds_have_masks_of_their_own() -> None:
    """Four pieces of equal rows, weights and model differ, and so does each under another seed."""
    pieces = outputs(seed=5) + outputs(seed=6)
    assert len(pieces) == 8
    for i, one in enumerate(pieces):
        assert not any(torch.equal(one, other) for other in pieces[i + 1 :])


def test_training_leaves_the_global_generator_alone() -> None:
    """The user's own random numbers are the same with and without a step in between."""
    graph = captured(Seen())

    def work(trainer: Trainer) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        before = torch.get_rng_state()
        trainer.step(torch.ones(8, 6).double())
        trainer.evaluate(torch.ones(8, 6).double())
        return before, torch.get_rng_state()

    ((before, after),) = on_ranks(graph, cases.make_plan(graph, (1,), 8, 2), work)
    assert torch.equal(before, after)
