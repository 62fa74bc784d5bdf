"""Three hundred steps of any size and length: memory does not grow."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from dapple.zoo.gpt import GPT, next_byte_loss, unmasked_tokens
from tests.runtime import cases
from tests.runtime.threads import TrainingOnly, run_threads

STEPS, WARM = 300, 20
LONGEST = 6


@functools.cache
def graph() -> LayerGraph:
    torch.manual_seed(7)
    model = GPT(vocab=16, width=4, layers=1, heads=1, context=LONGEST)
    example = torch.zeros(4, 3, dtype=torch.int64)
    return capture(
        model, example, loss=next_byte_loss, lengths={0: {1: "length"}}, evaluation=False
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """From 1 to 6 rows and tokens, the same in the two steps after which memory is looked at."""
    random = torch.Generator().manual_seed(step % (STEPS - WARM))
    rows, length = (int(torch.randint(1, LONGEST + 1, (), generator=random)) for _ in range(2))
    tokens = torch.randint(0, 16, (rows, length + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def tensors() -> list[torch.Tensor]:
    """All that are reachable, but for what a capture left, which has other types and no bytes."""
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]


def alive(before: Sequence[weakref.ref[torch.Tensor]]) -> tuple[int, int]:
    """Number of tensors that were not there before, and bytes of their storages."""
    old = {id(t) for t in (reference() for reference in before) if t is not None}
    found = [t for t in tensors() if id(t) not in old]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
    return len(found), sum(storages.values())


def resident_bytes() -> int:
    """Of this process, as the kernel counts."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    ("schedule", "replicas", "policy"),
    [("early-backward", (1, 1, 1), "B"), ("zero-bubble", (1, 1, 1), "A")],
)
def test_memory_is_flat(schedule: str, replicas: tuple[int, ...], policy: str) -> None:
    """As many live tensors and bytes after step 300 as after step 20, and the process no larger."""
    plan = cases.make_plan(graph(), replicas, 6, 2, schedule, policy=policy)
    before = [weakref.ref(tensor) for tensor in tensors()]
    barrier = threading.Barrier(plan.num_devices)
    found: list[tuple[int, int]] = []
    resident: list[int] = []

    def work(trainer: Trainer) -> float:
        for step in range(STEPS):
            loss = trainer.step(*batch(step)).loss
            if step + 1 in (WARM, STEPS) and barrier.wait() == 0:
                found.append(alive(before))
                resident.append(resident_bytes())
            if step + 1 in (WARM, STEPS):
                barrier.wait()
        return loss

    def rank(transport: object) -> float:
        return work(
            Trainer(
                TrainingOnly(graph()),  # type: ignore[arg-type]
                plan,
                cases.OPTIMIZERS["adamw"],
                weight=unmasked_tokens,
                transport=transport,  # type: ignore[arg-type]
                device=torch.device("cpu"),
            )
        )

    losses = run_threads(plan.num_devices, rank)
    assert len(set(losses)) == 1
    (count, size), (last_count, last_size) = found
    assert count > 50
    assert (last_count, last_size) == (count, size)
    # Below 1 MiB in a process of its own; after other tests, whose memory is reused, up to 10.
    assert resident[1] - resident[0] < 24 * 2**20
