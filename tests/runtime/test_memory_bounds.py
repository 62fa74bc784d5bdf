"""What a rank holds does not grow with the number of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from dapple.runtime.stage import StageRunner
from dapple.runtime.trainer import Trainer
from tests.runtime import cases
from tests.runtime.threads import on_ranks


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "skip"])
def test_boundary_memory_does_not_grow_with_micro_batches(
    name: str, replicas: tuple[int, ...]
) -> None:
    """Pitfall 17: as many live boundary bytes at M = 8 as at M = 64, on every rank."""
    graph, example = cases.build(name), cases.EXAMPLES[name]

    def peaks(micro_batches: int) -> list[int]:
        rows = 3 * micro_batches
        plan = cases.make_plan(graph, replicas, rows, micro_batches)

        def work(trainer: Trainer) -> int:
            trainer.step(*example.batch(rows, 0))
            return trainer.peak_boundary_bytes

        return on_ranks(graph, plan, work)

    few = peaks(8)
    assert min(few) > 0
    assert peaks(64) == few


def test_gpipe_holds_all_micro_batches() -> None:
    """The measure of the test above sees what GPipe keeps: all micro-batches of a step."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]

    def peak(micro_batches: int) -> int:
        plan = cases.make_plan(graph, (1, 1), 3 * micro_batches, micro_batches, "gpipe")

        def work(trainer: Trainer) -> int:
            trainer.step(*example.batch(3 * micro_batches, 0))
            return trainer.peak_boundary_bytes

        return max(on_ranks(graph, plan, work))

    assert peak(64) > 4 * peak(8)


def test_hooks_on_what_a_stage_receives_fire_once_per_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pitfall 18: each micro-batch has a leaf of its own, so hooks of the first don't pile up."""
    fired: list[str] = []
    forward = StageRunner.forward

    def hooked(
        self: StageRunner, number: int, rows: int, inputs: Any, received: Any, seed: Any
    ) -> Any:
        result = forward(self, number, rows, inputs, received, seed)
        for name, value in received.items():
            value.register_hook(lambda gradient, name=name: fired.append(name))
        return result

    monkeypatch.setattr(StageRunner, "forward", hooked)
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]
    plan = cases.make_plan(graph, (1, 1), 12, 4)

    def work(trainer: Trainer) -> int:
        trainer.step(*example.batch(12, 0))
        first = len(fired)
        trainer.step(*example.batch(12, 1))
        return first

    on_ranks(graph, plan, work)
    assert len(fired) == 2 * 4


def test_no_micro_batch_is_left_in_flight_after_a_step() -> None:
    """Losses and activations of a step are gone when it ends."""
    graph, example = cases.build("skip"), cases.EXAMPLES["skip"]
    plan = cases.make_plan(graph, (2, 1, 2), 12, 5)

    def work(trainer: Trainer) -> tuple[int, dict[str, Tensor]]:
        trainer.step(*example.batch(12, 0))
        return sum(r.in_flight for r in trainer.runners.values()), trainer.state_dict()

    assert [left for left, _ in on_ranks(graph, plan, work)] == [0] * 5
