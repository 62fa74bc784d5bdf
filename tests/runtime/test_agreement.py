"""Ranks that hold different weights are stopped before they train."""

from __future__ import annotations

import pytest
import torch

from dapple.errors import InputError
from dapple.runtime.trainer import Trainer
from tests.runtime import cases
from tests.runtime.threads import OwnCopy, ThreadTransport, run_threads, sgd


def first_step(name: str, replicas: tuple[int, ...], seeds: tuple[int, ...]) -> list[str]:
    """What each rank says of its first step, with a model of its own seed."""
    graphs = [cases.build(name, seed=seed) for seed in seeds]
    example = cases.EXAMPLES[name]

    def work(transport: ThreadTransport) -> str:
        graph = graphs[transport.rank]
        plan = cases.make_plan(graph, replicas, 6, 2)
        options = {"transport": transport, "device": torch.device("cpu"), "weight": example.weight}
        trainer = Trainer(OwnCopy(graph), plan, sgd, record=False, **options)
        try:
            trainer.step(*example.batch(6, 0), update=False)
        except InputError as error:
            return str(error)
        return ""

    return run_threads(len(seeds), work)


def test_replicas_with_different_weights_are_refused_with_the_first_name() -> None:
    """As when the random generator was not seeded before the model was built."""
    found = first_step("mlp", (2,), (7, 8))
    assert all(text.startswith('ranks 0, 1 hold parameter "') for text in found)


def test_holders_of_a_tied_weight_are_compared_over_stages() -> None:
    """One replica per stage each: only the embedding is on both."""
    found = first_step("gpt", (1, 1), (7, 8))
    assert all('parameter "embed.weight" with different values' in text for text in found)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 1, 1)], ids=str)
def test_equal_weights_pass(replicas: tuple[int, ...]) -> None:
    """Tied ones included."""
    assert first_step("gpt", replicas, (7, 7, 7)) == ["", "", ""]
