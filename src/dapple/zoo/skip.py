"""A small net that no chain of layers describes: values travel over its middle."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SkipNet(nn.Module):
    """Its first third feeds its last third, past the middle.

                    .------ skip (float), gate (bool) ------.
                    |                                       v
        x --> [first third] --> [middle third] --> join --> [last third] --> head
                    ^                 ^                           ^
        lengths ----+----- mask ------+---------------------------'

    Three kinds of values cross a cut in the middle besides the block's own output: `skip` with
    gradient; `gate`, a bool that depends on weights, so that no later stage can compute it from
    the inputs; and `mask`, a bool that depends on integer inputs only, so that every stage can.

    Args:
        width: C, features of a row.
        layers: number of blocks, a multiple of three.
        outputs: features of an output row.

    Raises:
        ValueError: `layers` is not a positive multiple of three.
    """

    def __init__(self, width: int = 32, layers: int = 6, outputs: int = 8) -> None:
        super().__init__()
        if layers < 3 or layers % 3:
            raise ValueError(f"layers {layers} is not a positive multiple of 3")
        self.blocks = nn.ModuleList([SkipBlock(width) for _ in range(layers)])
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Rows x [B, C] float, lengths [B] int64 (leading features that count) -> [B, outputs]."""
        third = len(self.blocks) // 3
        mask = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
        for block in self.blocks[:third]:
            x = block(x, mask)
        skip, gate = x, x > 0
        for block in self.blocks[third : 2 * third]:
            x = block(x, mask)
        x = self.join(torch.cat([x, torch.where(gate, skip, 0.1 * skip)], dim=1))
        for block in self.blocks[2 * third :]:
            x = block(x, mask)
        output: Tensor = self.head(x)
        return output


class SkipBlock(nn.Module):
    """x + gelu(linear(x)) where the mask is set, x elsewhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Rows x [B, C] float, mask [B, C] bool -> [B, C]."""
        return x + nn.functional.gelu(self.linear(x)).masked_fill(~mask, 0.0)
