"""VGG-19 (Simonyan and Zisserman 2014, configuration E): few big layers, most weights in one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

GROUPS = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
"""(convolutions, channels) up to each of the five pools."""


class VGG(nn.Module):
    """Convolutions of 3 x 3 with a pool after each group, then three linear layers.

        images --> features[0] --> ... --> features[15] --> fc1 --> fc2 --> prediction --> logits

    The defaults have 143 667 240 parameters, of which fc1 holds 102.8 M.

    Args:
        groups: (number of convolutions, channels) of each group, which a pool ends.
        width: features of the hidden linear layers.
        classes: number of classes.
        image: pixels of an image's side, a multiple of 2^groups.
        dropout: probability, after each hidden linear layer; 0.5 as published.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, int]] = GROUPS,
        width: int = 4096,
        classes: int = 1000,
        image: int = 224,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        plan = [
            (channels, number == count - 1) for count, channels in groups for number in range(count)
        ]
        channels = [3, *(c for c, _ in plan)]
        self.features = nn.Sequential(
            *[
                Convolution(before, after, pool)
                for (before, after), (_, pool) in zip(
                    itertools.pairwise(channels), plan, strict=True
                )
            ]
        )
        side = image >> len(groups)
        self.fc1 = nn.Linear(channels[-1] * side * side, width)
        self.fc2 = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.prediction = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, side, side] -> logits [B, classes]."""
        x = torch.flatten(self.features(images), 1)
        x = self.dropout(F.relu(self.fc1(x)))
        x = self.dropout(F.relu(self.fc2(x)))
        logits: Tensor = self.prediction(x)
        return logits


class Convolution(nn.Module):
    """3 x 3 convolution, ReLU, and a pool at the end of a group."""

    def __init__(self, before: int, after: int, pool: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, padding=1)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, H, W] -> [B, after, H, W], half the sides with a pool."""
        y: Tensor = self.pool(F.relu(self.convolution(x)))
        return y
