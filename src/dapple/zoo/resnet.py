"""ResNet-50 (He et al. 2015): bottleneck blocks with batch norm and shortcuts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

EXPANSION = 4
"""A block's output has so many times the channels of its middle."""


class ResNet(nn.Module):
    """A stem, four groups of bottleneck blocks, the mean over the image, and a linear head.

        images --> stem --> blocks[0] --> ... --> blocks[15] --> mean --> head --> logits

    The defaults have 25 557 032 parameters.

    Args:
        groups: number of blocks of each group; each group halves the sides and doubles the
            channels, but the first.
        width: channels of the stem, and of the middle of the first group's blocks.
        classes: number of classes.
    """

    def __init__(
        self, groups: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = Stem(width)
        blocks: list[nn.Module] = []
        channels = width
        for group, count in enumerate(groups):
            for number in range(count):
                stride = 2 if group and not number else 1
                blocks.append(Bottleneck(channels, width << group, stride))
                channels = EXPANSION * width << group
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] -> logits [B, classes]."""
        x = self.blocks(self.stem(images))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class Stem(nn.Module):
    """7 x 7 convolution and pool: a fourth of the sides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, channels, H / 4, W / 4]."""
        x: Tensor = self.pool(F.relu(self.norm(self.convolution(images))))
        return x


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut; the first one takes the stride."""

    def __init__(self, before: int, middle: int, stride: int) -> None:
        super().__init__()
        after = EXPANSION * middle
        self.reduce = nn.Conv2d(before, middle, 1, stride, bias=False)
        self.reduce_norm = nn.BatchNorm2d(middle)
        self.spread = nn.Conv2d(middle, middle, 3, padding=1, bias=False)
        self.spread_norm = nn.BatchNorm2d(middle)
        self.expand = nn.Conv2d(middle, after, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, H, W] -> [B, 4 * middle, H / stride, W / stride]."""
        y = F.relu(self.reduce_norm(self.reduce(x)))
        y = F.relu(self.spread_norm(self.spread(y)))
        return F.relu(self.expand_norm(self.expand(y)) + self.shortcut(x))
