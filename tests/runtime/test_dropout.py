"""Dropout: masks depend on seed, step, micro-batch and row, and are repeatable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from tests.graph.models import Dropped
from tests.runtime import cases
from tests.runtime.threads import compute_alone, on_ranks


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


class Mixed(nn.Module):
    """Layers that draw random numbers by several operators, and some that draw none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number % 3 == 0:
                x = nn.functional.dropout(x, 0.5, self.training) + 0.1 * torch.rand_like(x)
            elif number % 3 == 1:
                x = x * torch.bernoulli(torch.full_like(x, 0.5))
        return x


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1), (1, 2)], ids=str)
def test_masks_do_not_depend_on_the_cuts(
    replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps leave the same weights, bitwise, whether layers share a stage or not."""
    compute_alone(monkeypatch)
    torch.manual_seed(0)
    graph = capture(Mixed().double(), torch.randn(3, 6).double(), loss=cases.squared_error)
    last = replicas[-1]

    def weights(stages: tuple[int, ...]) -> dict[str, Tensor]:
        def work(trainer: Trainer) -> dict[str, Tensor]:
            for step in range(2):
                inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
                trainer.step(inputs, inputs)
            return trainer.state_dict()

        plan = cases.make_plan(graph, stages, 8, 2)
        return {n: v for state in on_ranks(graph, plan, work, seed=5) for n, v in state.items()}

    whole, cut = weights((last,)), weights((last,) * len(replicas))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    other = weights((2 if last == 1 else 1,))
    assert not all(torch.equal(value, other[name]) for name, value in whole.items())


def test_only_layers_that_draw_are_seeded() -> None:
    """Of six layers the four that draw are seeded, once each, in order; an LSTM without dropout not."""
    torch.manual_seed(0)
    graph = capture(Mixed(), torch.randn(3, 6), loss=cases.squared_error, evaluation=False)
    seeded: list[int] = []
    graph.stage(0, 6)(3, {graph.inputs[0].name: torch.randn(3, 6)}, {}, seeded.append)
    assert seeded == [0, 1, 3, 4]
    plain, dropped = (
        capture(Recurrent(p), torch.randn(3, 2, 6), loss=None, evaluation=False).stage(0, 1)
        for p in (0.0, 0.5)
    )
    assert (plain.is_random, dropped.is_random) == (False, True)


class Recurrent(nn.Module):
    """Two LSTMs, one on the other, with dropout between them, and their own loss."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, num_layers=2, dropout=probability, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()
