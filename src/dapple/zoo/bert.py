"""BERT (Devlin et al. 2018) with the head for question answering on SQuAD."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class BERT(nn.Module):
    """An encoder with norms after each branch; a start and an end score per token.

        tokens, segments --embeddings--> blocks[0] --> ... --> blocks[-1] --> head --> scores
        kept ---------- mask of attention ---^                     ^

    The defaults are BERT-Large with 334.1 M parameters; with 48 layers it has 636.4 M.

    Args:
        vocab: number of distinct tokens.
        width: C, size of a token's vector; a multiple of `heads`.
        layers: number of blocks.
        heads: attention heads per block.
        context: longest sequence, in tokens.
        dropout: probability, on embeddings, attention and branches; 0.1 as published.

    Raises:
        ValueError: `width` is no multiple of `heads`.
    """

    def __init__(
        self,
        vocab: int = 30522,
        width: int = 1024,
        layers: int = 24,
        heads: int = 16,
        context: int = 512,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.embeddings = Embeddings(vocab, width, context, dropout)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.head = nn.Linear(width, 2)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, segments: Tensor, kept: Tensor) -> Tensor:
        """Scores of each token as the answer's start and as its end.

        Args:
            tokens: [B, T] int64.
            segments: [B, T] int64, 0 in the question and 1 in the text.
            kept: [B, T] int64, 1 where there is a token and 0 for padding.

        Returns:
            [B, T, 2].
        """
        mask = (kept != 0)[:, None, None, :]
        x = self.embeddings(tokens, segments)
        for block in self.blocks:
            x = block(x, mask)
        scores: Tensor = self.head(x)
        return scores


class Embeddings(nn.Module):
    """Of words, positions and segments, added up and normed."""

    def __init__(self, vocab: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """[B, T] and [B, T] -> [B, T, C]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        total = self.words(tokens) + self.positions(places) + self.segments(segments)
        x: Tensor = self.dropout(self.norm(total))
        return x


class Block(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x)), on x [B, T, C]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = dropout
        self.queries = nn.Linear(width, width)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, T, C] and mask [B, 1, 1, T] bool -> [B, T, C]."""
        queries, keys, values = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, T, C / H]
            for project in (self.queries, self.keys, self.values)
        )
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        mixed = self.mix(attended.transpose(1, 2).flatten(2))
        x = self.attention_norm(x + self.dropout(mixed))
        y: Tensor = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return y


def answer_loss(scores: Tensor, answer: Tensor) -> Tensor:
    """Mean over the rows of the cross entropies of start and end, halved.

    Args:
        scores: [B, T, 2] float.
        answer: [B, 2] int64, first and last token of the answer.
    """
    return F.cross_entropy(scores, answer)
