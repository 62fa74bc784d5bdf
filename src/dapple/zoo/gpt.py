"""A byte-level GPT, written as anyone would write it: nothing here knows of dapple."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

IGNORED = -100
"""The target of a position that the loss leaves out."""


class GPT(nn.Module):
    """A decoder-only transformer (GPT-2, 2019): pre-norm, learned positions, tied embedding.

        tokens --embed + positions--> blocks[0] --> ... --> blocks[-1] --norm--> head --> logits
                    `------------------- the same weight -------------------------'

    The defaults have 8.0 M parameters.

    Args:
        vocab: V, number of distinct tokens; 256 for bytes.
        width: C, size of a token's vector; a multiple of `heads`.
        layers: number of blocks.
        heads: attention heads per block.
        context: longest sequence, in tokens.
        dropout: probability, on the embedding, the attention and each residual branch.

    Raises:
        ValueError: `width` is no multiple of `heads`.
    """

    def __init__(
        self,
        vocab: int = 256,
        width: int = 256,
        layers: int = 10,
        heads: int = 8,
        context: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self._initialise(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] int64, T <= context -> logits [B, T, V] of each next token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self, layers: int) -> None:
        """GPT-2's: N(0, 0.02), and the 2 * layers branches that add up share one variance."""
        for name, parameter in self.named_parameters():
            if name.endswith(("mix.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), on x [B, T, C]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Attention(nn.Module):
    """Causal self-attention of H heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, T, C / H]
            for part in self.query_key_value(x).chunk(3, dim=2)
        )
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=True,
        )
        mixed: Tensor = self.dropout(self.mix(attended.transpose(1, 2).flatten(2)))
        return mixed


class FeedForward(nn.Module):
    """Two linear layers with four times the width between them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        y: Tensor = self.dropout(self.down(F.gelu(self.up(x))))
        return y


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, in nats, over the positions whose target is not -100.

    NaN when every target is -100: a mean of nothing. `unmasked_tokens` is 0 then.

    Args:
        logits: [B, T, V] float.
        targets: [B, T] int64, in [0, V) or -100.
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def unmasked_tokens(inputs: Any, targets: Tensor) -> float:
    """How many targets `next_byte_loss` averages: those that are not -100.

    Args:
        inputs: not looked at.
        targets: [B, T] int64.
    """
    return float((targets != IGNORED).sum())
