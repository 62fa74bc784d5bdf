"""XLNet (Yang et al. 2019): relative attention, with the head for question answering."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class XLNet(nn.Module):
    """Blocks whose attention looks at distances; a start and an end score per token.

        tokens --> embedding --> blocks[0] --> ... --> blocks[-1] --> head --> scores
        segments, kept ------------^---- masks -----------^

    As in fine-tuning: one stream, no memory of earlier segments, every token sees all others. The
    defaults have 524.3 M parameters.

    Args:
        vocab: number of distinct tokens.
        width: C, size of a token's vector; a multiple of `heads`.
        layers: number of blocks.
        heads: attention heads per block.
        dropout: probability, on embedding, attention and branches; 0.1 as published.

    Raises:
        ValueError: `width` is no multiple of `heads`, or odd.
    """

    def __init__(
        self,
        vocab: int = 32000,
        width: int = 1024,
        layers: int = 36,
        heads: int = 16,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads or width % 2:
            raise ValueError(f"width {width} is not an even multiple of heads {heads}")
        self.width = width
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.head = nn.Linear(width, 2)
        self.dropout = nn.Dropout(dropout)
        # Without chance in them the distances are the same everywhere, and need not be sent.
        self.distance_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, segments: Tensor, kept: Tensor) -> Tensor:
        """Scores of each token as the answer's start and as its end.

        Args:
            tokens: [B, T] int64.
            segments: [B, T] int64.
            kept: [B, T] int64, 1 where there is a token and 0 for padding.

        Returns:
            [B, T, 2].
        """
        other_segment = (segments[:, :, None] != segments[:, None, :])[:, None]  # [B, 1, T, T]
        padding = (kept == 0)[:, None, None, :]
        x = self.dropout(self.embedding(tokens))
        distances = self.distance_dropout(self._distances(tokens.shape[1], x))
        for block in self.blocks:
            x = block(x, distances, other_segment, padding)
        scores: Tensor = self.head(self.dropout(x))
        return scores

    def _distances(self, length: int, like: Tensor) -> Tensor:
        """Sines and cosines of the distances T, T-1, ..., -T+1: [2 T, C]."""
        exponents = torch.arange(0, self.width, 2, device=like.device).to(like.dtype) / self.width
        places = torch.arange(length, -length, -1, device=like.device).to(like.dtype)
        angles = places[:, None] / 10000**exponents
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class Block(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x)), on x [B, T, C]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = RelativeAttention(width, heads, dropout)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, distances: Tensor, other_segment: Tensor, padding: Tensor
    ) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        attended = self.attention(x, distances, other_segment, padding)
        x = self.attention_norm(x + self.dropout(attended))
        y = self.dropout(self.down(self.dropout(F.gelu(self.up(x)))))
        z: Tensor = self.norm(x + y)
        return z


class RelativeAttention(nn.Module):
    """Attention whose scores add up content, distance and segment (section 2.5 of the paper)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, width, bias=False)
        self.values = nn.Linear(width, width, bias=False)
        self.places = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        each = (heads, 1, width // heads)
        self.content_bias = nn.Parameter(torch.empty(each))
        self.place_bias = nn.Parameter(torch.empty(each))
        self.segment_bias = nn.Parameter(torch.empty(each))
        self.segment_keys = nn.Parameter(torch.empty(heads, width // heads, 2))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, distances: Tensor, other_segment: Tensor, padding: Tensor
    ) -> Tensor:
        """Attend over all tokens.

        Args:
            x: [B, T, C].
            distances: [2 T, C], see `XLNet`.
            other_segment: [B, 1, T, T] bool, whether two tokens are of different segments.
            padding: [B, 1, 1, T] bool.

        Returns:
            [B, T, C].
        """
        queries, keys, values = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, T, C / H]
            for project in (self.queries, self.keys, self.values)
        )
        places = self.places(distances).unflatten(1, (self.heads, -1)).permute(1, 2, 0)
        scores = (queries + self.content_bias) @ keys.transpose(2, 3)
        scores = scores + _shifted((queries + self.place_bias) @ places)
        segment = (queries + self.segment_bias) @ self.segment_keys  # [B, H, T, 2]
        scores = scores + torch.where(other_segment, segment[..., 1:], segment[..., :1])
        scores = (scores * self.scale).masked_fill(padding, float("-inf"))
        attended = self.dropout(torch.softmax(scores, dim=3)) @ values
        mixed: Tensor = self.mix(attended.transpose(1, 2).flatten(2))
        return mixed


def _shifted(scores: Tensor) -> Tensor:
    """From scores by distance to scores by token: [B, H, T, 2 T] -> [B, H, T, T].

    Token i finds the score of token j in column T - i + j. Read row by row with one column less,
    each row starts one place further to the right.
    """
    length = scores.shape[2]
    rows = scores.flatten(2)[..., length:].unflatten(2, (length, 2 * length - 1))
    shifted: Tensor = rows[..., :length]
    return shifted
