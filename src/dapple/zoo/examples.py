"""Example tensors that are the same each time."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def integers(low: int, high: int, shape: tuple[int, ...], salt: int) -> Tensor:
    """Whole numbers in [low, high), int64; `salt` tells tensors of one workload apart."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(salt))


def normal(model: nn.Module, shape: tuple[int, ...], salt: int) -> Tensor:
    """Normal numbers in the model's dtype at the time of the call: double after `.double()`."""
    dtype = next(model.parameters()).dtype
    return torch.randn(shape, generator=torch.Generator().manual_seed(salt)).to(dtype)
