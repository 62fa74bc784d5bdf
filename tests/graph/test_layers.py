"""Which layers a model has: the children of its repeated containers, and what lies beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dapple.graph import capture


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class ResNetLike(nn.Module):
    """Sequentials of blocks, one after the other, between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.layer2 = nn.Sequential(Residual(), Residual(), Residual())
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))))


class Stack(nn.Module):
    """Blocks in a ModuleList, with a norm after them, as encoders and decoders are built."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual() for _ in range(count)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(2), Stack(2)
        self.bridge = nn.Bilinear(4, 4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(source)
        return self.head(self.bridge(self.decoder(target), memory))


class Wrapped(nn.Module):
    """A language model as libraries nest it: model.backbone.layers.N."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Stack(3)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def layers(model: nn.Module, inputs: int = 1, finer: bool = False) -> tuple[str, ...]:
    example = tuple(torch.randn(3, 4) for _ in range(inputs))
    graph = capture(model, example, loss=nn.functional.mse_loss, finer=finer, evaluation=False)
    return graph.layer_names


def test_a_sequential_of_blocks_is_opened() -> None:
    """A ResNet's stages are as many layers as they have blocks; its stem stays whole."""
    assert layers(ResNetLike()) == (
        "stem.0",
        "layer1.0",
        "layer1.1",
        "layer2.0",
        "layer2.1",
        "layer2.2",
        "fc",
    )


def test_blocks_of_a_module_list_are_layers() -> None:
    """A transformer's blocks are layers, however deep the list is nested."""
    assert layers(Wrapped()) == (
        "backbone.blocks.0",
        "backbone.blocks.1",
        "backbone.blocks.2",
        "backbone.norm",
        "head",
    )


def test_encoder_and_decoder_are_both_opened() -> None:
    """Two stacks of blocks give the blocks of both, in the order of execution."""
    assert layers(EncoderDecoder(), inputs=2) == (
        "encoder.blocks.0",
        "encoder.blocks.1",
        "encoder.norm",
        "decoder.blocks.0",
        "decoder.blocks.1",
        "decoder.norm",
        "bridge",
        "head",
    )


def test_finer_layers_are_leaf_modules() -> None:
    """On request a block is opened too."""
    assert layers(Wrapped(), finer=True) == (
        "backbone.blocks.0.first",
        "backbone.blocks.0.second",
        "backbone.blocks.1.first",
        "backbone.blocks.1.second",
        "backbone.blocks.2.first",
        "backbone.blocks.2.second",
        "backbone.norm",
        "head",
    )


def test_modules_without_parameters_go_with_the_layer_before() -> None:
    """Activations and pooling are no layers of their own."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Flatten(), nn.Tanh())
    assert layers(plain) == ("0", "2")


def test_a_model_of_one_module_is_one_layer() -> None:
    """A bare linear layer is a model too."""
    assert len(layers(nn.Linear(4, 4))) == 1


def test_a_renamed_class_has_the_same_layers() -> None:
    """Pitfall 25: nothing depends on the names of classes."""
    renamed = type("Something", (Wrapped,), {})
    assert layers(renamed()) == layers(Wrapped())
