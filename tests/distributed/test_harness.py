from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from dapple.runtime.heartbeat import Progress
from tests.distributed.harness import RanksFailed, note_action, run_ranks, watch


def _sum_of_ranks(rank: int, world_size: int, factor: int) -> torch.Tensor:
    total = torch.tensor([float(rank * factor)])
    dist.all_reduce(total)
    return total + rank


def test_results_come_back_by_rank() -> None:
    results = run_ranks(2, _sum_of_ranks, 10)
    assert [result.item() for result in results] == [10.0, 11.0]


def _wait_for_nobody(rank: int, world_size: int) -> None:
    note_action(f"receive on {rank}")
    if rank == 0:
        progress = Progress(rank, stage=0)
        progress.set("receive", 5)
        watch(progress)
        dist.recv(torch.zeros(1), 1)  # never sent
    time.sleep(60)


def test_a_hang_is_ended_and_shows_where_each_rank_was() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, _wait_for_nobody, timeout_seconds=2)
    text = str(failure.value)
    assert text.startswith("not done after 2 s")
    assert "rank 0 was still running; last action: receive of micro-batch 5" in text
    assert "rank 1 was still running; last action: receive on 1" in text
    assert text.count("in _wait_for_nobody") == 2


def _raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError(f"boom on {rank}")
    dist.recv(torch.zeros(1), 1)


def test_an_exception_on_one_rank_ends_all_and_is_shown() -> None:
    with pytest.raises(RanksFailed, match="rank 1 failed") as failure:
        run_ranks(2, _raise_on_one)
    assert "ValueError: boom on 1" in str(failure.value)


def _die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def test_a_dead_process_ends_all() -> None:
    with pytest.raises(RanksFailed, match="rank 1 ended with exit code 7"):
        run_ranks(2, _die_on_one)
