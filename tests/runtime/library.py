"""Models as their libraries or textbooks have them, small, in float64, with batches for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY, LENGTH = 16, 5
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class BasicBlock(nn.Module):
    """Two convolutions with batch norm and a shortcut, as in ResNet-18."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += shortcut
        return self.relu(y)


class ResNet(nn.Module):
    """A stem, two stages of basic blocks, pooling, and a head."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(self.pool(x).flatten(1))


class Translator(nn.Module):
    """LSTM encoder and decoder with attention, as in GNMT."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(2)])
        self.target = nn.Embedding(VOCABULARY, width)
        self.decoder = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(2)])
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.source(source)
        for layer in self.encoder:
            x = x + layer(x)[0]
        y, state = self.target(target), None
        for layer in self.decoder:
            made, state = layer(y, state)
            y = y + made
        y = y + self.attention(y, x, x)[0]
        return self.head(y)


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    renamed = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": VOCABULARY}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**renamed, **drops, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def _bert(head: str, layers: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {**SMALL, "num_hidden_layers": layers}
    return getattr(transformers, head)(transformers.BertConfig(**sizes, **drops))


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))


def _tokens(rows: int, random: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=random)


def _lengths_mask(rows: int, random: torch.Generator) -> Tensor:
    lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=random)
    return (torch.arange(LENGTH) < lengths).long()


def _causal(rows: int, random: torch.Generator) -> tuple[Any, Any]:
    tokens, mask = _tokens(rows, random), _lengths_mask(rows, random)
    return {"input_ids": tokens, "attention_mask": mask}, tokens.masked_fill(mask == 0, -100)


def _next_token_loss(output: Any, tokens: Tensor) -> Tensor:
    # The library's own loss works in float32, which hides what is looked for here.
    logits = output.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


def _masked(rows: int, random: torch.Generator) -> tuple[Any, Any]:
    tokens, mask = _tokens(rows, random), _lengths_mask(rows, random)
    hidden = torch.rand(rows, LENGTH, generator=random) < 0.4
    labels = tokens.masked_fill(~hidden, -100)
    kinds = torch.zeros_like(tokens)
    tokens = tokens.masked_fill(hidden, 0)
    named = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": kinds, "labels": labels}
    return named, None


def _questions(rows: int, random: torch.Generator) -> tuple[Any, Any]:
    first, last = (torch.randint(0, LENGTH, (rows,), generator=random) for _ in range(2))
    named = {"input_ids": _tokens(rows, random), "attention_mask": _lengths_mask(rows, random)}
    return {**named, "start_positions": first, "end_positions": last}, None


def _pairs(rows: int, random: torch.Generator) -> tuple[Any, Any]:
    source, target = _tokens(rows, random)[:, :3], _tokens(rows, random)
    return (source, target[:, :3]), target[:, 1:4]


def _images(rows: int, random: torch.Generator) -> tuple[Any, Any]:
    images = torch.randn(rows, 3, 6, 6, generator=random, dtype=torch.float64)
    return images, torch.randint(0, 4, (rows,), generator=random)


def _token_loss(output: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), tokens.flatten())


@dataclasses.dataclass(frozen=True)
class LibraryModel:
    """A model and how it is trained.

    Attributes:
        build: makes it.
        examples: (rows, random numbers) -> (inputs, targets).
        layers: how many layers the capture finds.
        loss: (output, targets) -> loss; None: the model returns it.
        weight: what the loss is a mean over; None: rows.
    """

    build: Callable[[], nn.Module]
    examples: Callable[[int, torch.Generator], tuple[Any, Any]]
    layers: int
    loss: Callable[[Any, Any], Tensor] | None = None
    weight: Callable[[Any, Any], Any] | None = None

    def make(self) -> nn.Module:
        """The model, always with the same weights."""
        torch.manual_seed(5)
        return self.build().double()

    def batch(self, rows: int, step: int) -> tuple[Any, Any]:
        """(inputs, targets) of a step."""
        return self.examples(rows, torch.Generator().manual_seed(700 + step))


def _shifted(inputs: Any, targets: Tensor) -> Tensor:
    return (targets[:, 1:] != -100).sum()


MODELS = {
    "gpt2": LibraryModel(_gpt2, _causal, 6, _next_token_loss, _shifted),
    "llama": LibraryModel(_llama, _causal, 5, _next_token_loss, _shifted),
    "bert-masked": LibraryModel(
        # As many layers as six virtual stages need.
        functools.partial(_bert, "BertForMaskedLM", 4),
        _masked,
        6,
        weight=lambda inputs, _: (inputs["labels"] != -100).sum(),
    ),
    "bert-questions": LibraryModel(
        functools.partial(_bert, "BertForQuestionAnswering"), _questions, 4
    ),
    "translator": LibraryModel(Translator, _pairs, 8, _token_loss),
    "resnet": LibraryModel(ResNet, _images, 7, F.cross_entropy),
}
