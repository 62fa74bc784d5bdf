"""What `own_training.toml` names: data, a loss with its weight, and a metric of your own."""

import itertools
from collections.abc import Iterator

import torch
from torch import nn

import dapple

CLASSES = 8


def workload(width: int = 32, layers: int = 6) -> dapple.Workload:
    torch.manual_seed(0)  # the same weights on every rank
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        for _ in range(layers)
    ]
    return dapple.Workload(
        name="classifier",
        model=nn.Sequential(*blocks, nn.Linear(width, CLASSES)),
        inputs=lambda rows: (torch.randn(rows, width),),
        targets=lambda rows: torch.randint(0, CLASSES, (rows,)),
        loss=nn.functional.cross_entropy,
    )


def batches(
    split: str, global_batch_size: int, seed: int, width: int = 32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Which of the first numbers of a row is largest; one label in ten is missing (-100)."""
    for step in itertools.count():
        g = torch.Generator().manual_seed(1000 * seed + 2 * step + (split == "validation"))
        x = torch.randn(global_batch_size, width, generator=g)
        labels = x[:, :CLASSES].argmax(1)
        labels[torch.rand(global_batch_size, generator=g) < 0.1] = -100
        yield x, labels


def smoothed_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over the rows that have a label."""
    return nn.functional.cross_entropy(output, labels, label_smoothing=0.1)


def labelled(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many those are."""
    return (labels >= 0).sum()


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the rows that have a label."""
    return (output.argmax(1) == labels)[labels >= 0].float().mean()
