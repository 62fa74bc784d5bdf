"""What users write for "module:function": models and data, sound and faulty ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dapple

not_a_function = 3


def workload(width: int = 8) -> dapple.Workload:
    return dapple.Workload(
        name="own",
        model=nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)),
        inputs=lambda rows: (torch.ones(rows, 4),),
        targets=lambda rows: torch.zeros(rows, 2),
        loss=nn.functional.mse_loss,
    )


class Checkpointed(nn.Linear):
    """A layer that saves memory by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed() -> dapple.Workload:
    return dapple.Workload(
        name="checkpointed",
        model=nn.Sequential(Checkpointed(4, 4), nn.Linear(4, 2)),
        inputs=lambda rows: (torch.ones(rows, 4),),
        targets=lambda rows: torch.zeros(rows, 2),
        loss=nn.functional.mse_loss,
    )


def a_number() -> int:
    return 3


def fails_inside() -> dapple.Workload:
    raise TypeError("no such encoder")


def batches(split: str, global_batch_size: int, seed: int, features: int = 4) -> Iterator:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(global_batch_size, features, generator=generator)
        yield x, x[:, :2]


def no_batches(split: str, global_batch_size: int, seed: int) -> list:
    return []


def no_pairs(split: str, global_batch_size: int, seed: int) -> list:
    return [torch.ones(global_batch_size, 4)]


def no_iterator(split: str, global_batch_size: int, seed: int) -> int:
    return 5


def no_validation(split: str, global_batch_size: int, seed: int) -> Iterator:
    if split == "validation":
        raise OSError("corpus.valid is missing")
    return batches(split, global_batch_size, seed)


def no_optimizer(parameters: list, lr: float) -> int:
    return 3
