"""AmoebaNet-D (Real et al. 2018): evolved cells that read the two cells before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Genotype(NamedTuple):
    """A cell's wiring.

    Attributes:
        pairs: each makes a new state as the sum of two operations on earlier states; states 0 and
            1 are the outputs of the last cell and of the one before.
        joined: the states whose channels are joined to the cell's output.
    """

    pairs: tuple[tuple[tuple[int, str], tuple[int, str]], ...]
    joined: tuple[int, ...]


# Wiring as in the evolved network's released form, whose sizes GPipe (2019, table 1) reports.
NORMAL = Genotype(
    (
        ((1, "1x1"), (1, "max 3x3")),
        ((1, "none"), (0, "1x7 7x1")),
        ((0, "1x1"), (0, "1x7 7x1")),
        ((2, "max 3x3"), (2, "none")),
        ((1, "average 3x3"), (5, "1x1")),
    ),
    (0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        ((0, "max 2x2"), (0, "max 3x3")),
        ((2, "none"), (1, "3x3")),
        ((2, "1x7 7x1"), (2, "max 3x3")),
        ((3, "none"), (1, "max 2x2")),
        ((2, "average 3x3"), (3, "1x1")),
    ),
    (4, 5, 6),
)


class AmoebaNet(nn.Module):
    """A stem, then three groups of normal cells with a reduction cell before each but the first.

        images --> stem --> cells[0] --> cells[1] --> cells[2] --> ... --> mean --> head --> logits
                     |        ^ '------------^------------^
                     '--------'--------------'  every cell reads the two before it

    The defaults, 36 normal cells and 512 filters, have 935.8 M parameters.

    Args:
        layers: number of normal cells, a multiple of three.
        filters: the last group's cells compute with four times as many channels; a multiple of 16.
        classes: number of classes.

    Raises:
        ValueError: `layers` or `filters` is no such multiple.
    """

    def __init__(self, layers: int = 36, filters: int = 512, classes: int = 1000) -> None:
        super().__init__()
        if layers < 3 or layers % 3:
            raise ValueError(f"layers {layers} is not a positive multiple of 3")
        if filters < 16 or filters % 16:
            raise ValueError(f"filters {filters} is not a positive multiple of 16")
        channels = filters // 4
        self.stem = Stem(channels)
        group = [False] * (layers // 3)
        reductions = [True, True, *group, True, *group, True, *group]
        cells: list[nn.Module] = []
        before, last = channels, channels
        shrunk = False
        for reduction in reductions:
            channels *= 2 if reduction else 1
            cells.append(Cell(before, last, channels, reduction, shrunk))
            joined = (REDUCTION if reduction else NORMAL).joined
            before, last, shrunk = last, channels * len(joined), reduction
        self.cells = nn.ModuleList(cells)
        self.head = nn.Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] -> logits [B, classes]."""
        x = before = self.stem(images)
        for cell in self.cells:
            x, before = cell(x, before), x
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class Stem(nn.Module):
    """3 x 3 convolution: half the sides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, channels, H / 2, W / 2]."""
        x: Tensor = self.norm(self.convolution(F.relu(images)))
        return x


class Cell(nn.Module):
    """One cell.

    Args:
        before: channels of the cell before the last.
        last: channels of the last cell.
        channels: channels that the operations compute with.
        reduction: halve the sides.
        shrunk: the last cell halved the sides, so that the one before is twice as large.
    """

    def __init__(
        self, before: int, last: int, channels: int, reduction: bool, shrunk: bool
    ) -> None:
        super().__init__()
        genotype = REDUCTION if reduction else NORMAL
        self.joined = genotype.joined
        self.sources = [source for pair in genotype.pairs for source, _ in pair]
        self.fit_last = _convolution(last, channels)
        self.fit_before: nn.Module = nn.Identity()
        if shrunk:
            self.fit_before = Halved(before, channels)
        elif before != channels:
            self.fit_before = _convolution(before, channels)
        self.operations = nn.ModuleList(
            [
                OPERATIONS[kind](channels, 2 if reduction and source < 2 else 1)
                for pair in genotype.pairs
                for source, kind in pair
            ]
        )

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        """The outputs of the last cell and of the one before -> this cell's output."""
        states = [self.fit_last(last), self.fit_before(before)]
        made = list(zip(self.sources, self.operations, strict=True))
        for (one, first), (two, second) in zip(made[::2], made[1::2], strict=True):
            states.append(first(states[one]) + second(states[two]))
        return torch.cat([states[number] for number in self.joined], dim=1)


class Halved(nn.Module):
    """Half the sides by two 1 x 1 convolutions, one of them on pixels shifted by one."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(before, after // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(before, after // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, H, W] -> [B, after, H / 2, W / 2]."""
        x = F.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        y: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return y


Size = tuple[int, int]


def _convolution(
    before: int, after: int, kernel: Size = (1, 1), stride: Size = (1, 1)
) -> nn.Sequential:
    """ReLU, convolution and batch norm."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(before, after, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(after),
    )


def _narrow(channels: int, kernels: Sequence[tuple[Size, Size]]) -> nn.Sequential:
    """Convolutions with a fourth of the channels between two of 1 x 1: (kernel, stride) each."""
    narrow = channels // 4
    return nn.Sequential(
        _convolution(channels, narrow),
        *[_convolution(narrow, narrow, kernel, stride) for kernel, stride in kernels],
        _convolution(narrow, channels),
    )


OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda channels, stride: nn.Identity() if stride == 1 else Halved(channels, channels),
    "1x1": lambda channels, stride: _convolution(channels, channels, stride=(stride, stride)),
    "3x3": lambda channels, stride: _narrow(channels, [((3, 3), (stride, stride))]),
    "1x7 7x1": lambda channels, stride: _narrow(
        channels, [((1, 7), (1, stride)), ((7, 1), (stride, 1))]
    ),
    "max 2x2": lambda channels, stride: nn.MaxPool2d(2, stride),
    "max 3x3": lambda channels, stride: nn.MaxPool2d(3, stride, padding=1),
    "average 3x3": lambda channels, stride: nn.AvgPool2d(
        3, stride, padding=1, count_include_pad=False
    ),
}
