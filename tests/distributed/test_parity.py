"""Every plan trains like one process, on real processes over gloo (pitfalls 1, 2, 5, 7, 8, 10 to 12).

The skip net has two tensors per boundary, so several handles are under way at once (pitfall 7).
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from dapple.runtime.watch import NoWatch
from tests.distributed.harness import note_action, run_ranks
from tests.runtime import cases
from tests.runtime.cases import Run, global_error
from tests.runtime.runs import ALL_RUNS
from tests.runtime.test_library import one_process, train_rank
from tests.runtime.threads import TrainingOnly

RESNET_REPLICAS = (1, 3, 1)
WORLD_SIZES = sorted({sum(run.replicas) for run in ALL_RUNS})


class Noted:
    """Tells the harness each action, for when a rank hangs."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def set(self, action: str, micro_batch: int | None) -> None:
        note_action(f"{action} of micro-batch {micro_batch} in {self._run}")


def train_all(rank: int, world_size: int, runs: list[Run]) -> list[Any]:
    """One rank's parameters and losses of each run, and of a ResNet at the end."""
    found: list[Any] = []
    for number, run in enumerate(runs):
        # Pitfall 10: the ranks make their channels at different times, in no fixed order.
        time.sleep(0.004 * ((7 * rank + 3 * number) % 5))
        # Captured before the ranks were forked; each trains a copy.
        graph = TrainingOnly(cases.build(run.model, evaluation=False))
        found.append(cases.train(graph, run, watch=NoWatch(Noted(run))))
    if world_size == sum(RESNET_REPLICAS):
        found.append(train_rank("resnet", RESNET_REPLICAS))
    return found


def capture_all(runs: list[Run]) -> None:
    """What every rank would do for itself; each then trains copies."""
    for run in runs:
        cases.build(run.model, evaluation=False)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_and_losses_equal_one_process(world_size: int) -> None:
    """Parameters after three steps and every loss equal one process on the whole batch."""
    runs = [run for run in ALL_RUNS if sum(run.replicas) == world_size]
    results = run_ranks(world_size, train_all, runs, timeout_seconds=150, prepare=capture_all)
    errors = {
        run: cases.error(run, [by_run[number] for by_run in results])
        for number, run in enumerate(runs)
    }
    assert {run: error for run, error in errors.items() if not error < cases.TOLERANCE} == {}
    if world_size == sum(RESNET_REPLICAS):
        # Batch norms add up over three replicas, of which one has no rows at times.
        state, loss = one_process("resnet")
        assert global_error([by_run[-1][0] for by_run in results], state) < cases.TOLERANCE
        assert [by_run[-1][1] for by_run in results] == pytest.approx([loss] * world_size)
