"""Every plan trains like one process: float64, ranks as threads, messages without tags."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.runtime import cases
from tests.runtime.threads import OwnCopy, ThreadTransport, run_threads

TOLERANCE = 1e-10


def run_case(
    name: str, replicas: list[int], micro_batches: int, rows: int, optimizer: str, schedule: str
) -> None:
    graph = cached_graph(name)
    plan = cases.make_plan(graph, replicas, rows, micro_batches, schedule)

    def work(transport: ThreadTransport) -> Any:
        return cases.train_graph(
            OwnCopy(graph), {"transport": transport}, name, rows, optimizer, plan
        )

    results = run_threads(sum(replicas), work)
    wanted, losses = cached_reference(name, rows, optimizer)
    assert cases.global_error([state for state, _ in results], wanted) < TOLERANCE
    for _, found in results:
        assert found == pytest.approx(losses, rel=1e-12)


cached_reference = functools.cache(cases.reference)
cached_graph = functools.cache(cases.build)


@pytest.mark.parametrize("replicas", [[1, 1], [3, 2], [2, 1, 2], [1]], ids=str)
@pytest.mark.parametrize("name", list(cases.EXAMPLES))
def test_parameters_and_losses_equal_one_process(name: str, replicas: list[int]) -> None:
    """Parameters after three steps and every loss equal one process on the whole batch."""
    run_case(name, replicas, 5, 13, "adamw", "early-backward")
