"""Workloads to profile, as functions of a module: measuring processes find them by name."""

from __future__ import annotations

import torch
from torch import nn

from dapple.workload import Workload
from dapple.zoo import make_workload


def small_mlp() -> Workload:
    return make_workload("mlp", inputs=3, width=5, outputs=2, hidden=1)


class Branches(nn.Module):
    """One tensor read by the next layer and by the last; a position table beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = torch.tanh(self.middle(a))
        y: torch.Tensor = self.last(a + b)
        return y


def branches() -> Workload:
    return Workload(
        name="branches",
        model=Branches(),
        inputs=lambda rows: (torch.ones(rows, 4),),
        targets=lambda rows: torch.zeros(rows, 2),
        loss=nn.functional.mse_loss,
    )


def a_list() -> list[int]:
    return [3]


def fails_inside() -> Workload:
    raise TypeError("no such encoder")
