"""GNMT (Wu et al. 2016): LSTM encoder and decoder with attention, to translate."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GNMT(nn.Module):
    """A bidirectional layer and further ones over the source; as many over the target.

        source --> source_embedding --> both_ways --> encoder[0] --> ... --> encoder[-1] ---.
                                                                                            v
        target --> target_embedding --> first --------------------------------------> attention
                                          '--> decoder[0] --> ... --> decoder[-1] --> head  |
                                                   ^                    ^---- context ------'

    Residual connections start with the third layer. The context joins the input of every decoder
    layer but the first. The defaults have 290.7 M parameters.

    Args:
        vocab: number of distinct tokens of each language; 36 548 are WMT16's byte pairs.
        width: C, size of a token's vector and of each layer's state.
        layers: of the encoder, and of the decoder, >= 2.
        dropout: probability, on each layer's input; 0.2 as published.
    """

    def __init__(
        self, vocab: int = 36548, width: int = 1024, layers: int = 8, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if layers < 2:
            raise ValueError(f"layers {layers} are too few; use 2 or more")
        self.source_embedding = nn.Embedding(vocab, width)
        self.both_ways = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(
            [Layer(2 * width if not i else width, width, bool(i)) for i in range(layers - 1)]
        )
        self.target_embedding = nn.Embedding(vocab, width)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.attention = Attention(width)
        self.decoder = nn.ModuleList([Layer(2 * width, width, bool(i)) for i in range(layers - 1)])
        self.head = nn.Linear(width, vocab)
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Logits of each next token, the tokens before it given.

        Args:
            source: [B, S] int64.
            lengths: [B] int64, how many of each row's source tokens are no padding, >= 1.
            target: [B, T] int64.

        Returns:
            [B, T, vocab].
        """
        padding = torch.arange(source.shape[1], device=source.device) >= lengths[:, None]
        x, _ = self.both_ways(self.dropout(self.source_embedding(source)))
        for layer in self.encoder:
            x = layer(self.dropout(x), None)
        y, _ = self.first(self.dropout(self.target_embedding(target)))
        context = self.attention(y, x, padding)
        for layer in self.decoder:
            y = layer(self.dropout(y), context)
        logits: Tensor = self.head(y)
        return logits


class Layer(nn.Module):
    """An LSTM over time with a residual connection from the second on."""

    def __init__(self, inputs: int, width: int, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.lstm = nn.LSTM(inputs, width, batch_first=True)

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        """[B, T, C], and a context of the same shape that joins the input -> [B, T, C]."""
        y: Tensor
        y, _ = self.lstm(x if context is None else torch.cat([x, context], dim=2))
        return y + x if self.residual else y


class Attention(nn.Module):
    """Bahdanau's attention, normalised: g v/|v| . tanh(W q + U k + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.direction = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, queries: Tensor, keys: Tensor, padding: Tensor) -> Tensor:
        """Queries [B, T, C], keys [B, S, C], padding [B, S] bool -> contexts [B, T, C]."""
        sums = self.query(queries)[:, :, None] + self.key(keys)[:, None] + self.bias
        direction = self.scale * self.direction / self.direction.norm()
        scores = torch.tanh(sums) @ direction  # [B, T, S]
        scores = scores.masked_fill(padding[:, None], float("-inf"))
        return torch.softmax(scores, dim=2) @ keys
