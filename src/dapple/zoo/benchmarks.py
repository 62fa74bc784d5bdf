"""The models of the paper's evaluation as workloads (DAPPLE, section 6; docs/zoo.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dapple.workload import Workload
from dapple.zoo.amoebanet import AmoebaNet
from dapple.zoo.bert import BERT, answer_loss
from dapple.zoo.examples import integers, normal
from dapple.zoo.gnmt import GNMT
from dapple.zoo.gpt import next_byte_loss, unmasked_tokens
from dapple.zoo.resnet import ResNet
from dapple.zoo.vgg import GROUPS, VGG
from dapple.zoo.xlnet import XLNet


def vgg_workload(
    groups: tuple[tuple[int, int], ...] = GROUPS,
    width: int = 4096,
    classes: int = 1000,
    image: int = 224,
    dropout: float = 0.0,
) -> Workload:
    """VGG-19: images [B, 3, image, image]. Arguments as `VGG`."""
    model = VGG(groups, width, classes, image, dropout)
    return _images("vgg-19", model, image, classes)


def resnet_workload(
    groups: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000, image: int = 224
) -> Workload:
    """ResNet-50: images [B, 3, image, image]. Arguments as `ResNet`."""
    return _images("resnet-50", ResNet(groups, width, classes), image, classes)


def amoebanet_workload(
    layers: int = 36, filters: int = 512, classes: int = 1000, image: int = 224
) -> Workload:
    """AmoebaNet-D with 36 cells: images [B, 3, image, image]. Arguments as `AmoebaNet`."""
    return _images("amoebanet-36", AmoebaNet(layers, filters, classes), image, classes)


def gnmt_workload(
    vocab: int = 36548, width: int = 1024, layers: int = 8, length: int = 50, dropout: float = 0.0
) -> Workload:
    """GNMT-16: source and target [B, length], weighted by unmasked tokens. Arguments as `GNMT`."""
    return Workload(
        name="gnmt-16",
        model=GNMT(vocab, width, layers, dropout),
        inputs=lambda rows: (
            integers(0, vocab, (rows, length), salt=0),
            integers(1, length + 1, (rows,), salt=2),
            integers(0, vocab, (rows, length), salt=3),
        ),
        targets=lambda rows: integers(0, vocab, (rows, length), salt=1),
        loss=next_byte_loss,
        weight=unmasked_tokens,
    )


def bert_48_workload(
    vocab: int = 30522,
    width: int = 1024,
    layers: int = 48,
    heads: int = 16,
    length: int = 384,
    context: int = 512,
    dropout: float = 0.0,
) -> Workload:
    """BERT with 48 layers: tokens, segments and mask [B, length]. Arguments as `BERT`."""
    model = BERT(vocab, width, layers, heads, context, dropout)
    return _answers("bert-48", model, vocab, length)


def bert_large_workload(
    vocab: int = 30522,
    width: int = 1024,
    layers: int = 24,
    heads: int = 16,
    length: int = 384,
    context: int = 512,
    dropout: float = 0.0,
) -> Workload:
    """BERT-Large: tokens, segments and mask [B, length]. Arguments as `BERT`."""
    model = BERT(vocab, width, layers, heads, context, dropout)
    return _answers("bert-large", model, vocab, length)


def xlnet_workload(
    vocab: int = 32000,
    width: int = 1024,
    layers: int = 36,
    heads: int = 16,
    length: int = 512,
    dropout: float = 0.0,
) -> Workload:
    """XLNet-36: tokens, segments and mask [B, length]. Arguments as `XLNet`."""
    return _answers("xlnet-36", XLNet(vocab, width, layers, heads, dropout), vocab, length)


BENCHMARKS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {
        "vgg-19": vgg_workload,
        "resnet-50": resnet_workload,
        "gnmt-16": gnmt_workload,
        "bert-48": bert_48_workload,
        "bert-large": bert_large_workload,
        "xlnet-36": xlnet_workload,
        "amoebanet-36": amoebanet_workload,
    }
)
"""Name -> factory of a workload of the paper's evaluation."""


def _images(name: str, model: nn.Module, image: int, classes: int) -> Workload:
    return Workload(
        name=name,
        model=model,
        inputs=lambda rows: (normal(model, (rows, 3, image, image), salt=0),),
        targets=lambda rows: integers(0, classes, (rows,), salt=1),
        loss=_classification_loss,
    )


def _classification_loss(logits: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(logits, classes)


def _answers(name: str, model: nn.Module, vocab: int, length: int) -> Workload:
    def inputs(rows: int) -> tuple[Tensor, ...]:
        kept = (integers(0, 8, (rows, length), salt=3) > 0).long()
        kept[:, 0] = 1  # a row of padding alone has no softmax
        segments = integers(0, 2, (rows, length), salt=2)
        return integers(0, vocab, (rows, length), salt=0), segments, kept

    return Workload(
        name=name,
        model=model,
        inputs=inputs,
        targets=lambda rows: integers(0, length, (rows, 2), salt=1),
        loss=answer_loss,
    )
