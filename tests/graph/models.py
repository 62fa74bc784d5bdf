"""Small models, each with one trait that cutting a model has to survive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dapple.zoo.gpt import GPT, next_byte_loss
from dapple.zoo.mlp import MLP
from dapple.zoo.skip import SkipNet


def _linears(count: int, width: int = 6) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(width, width) for _ in range(count)])


class CalledTwice(nn.Module):
    """One module runs at the start and again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.middle = _linears(2)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return self.head(torch.tanh(self.shared(x)))


class TwoNames(nn.Module):
    """Distant layers share one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class EarlyOutput(nn.Module):
    """The output of an early layer is an output of the model, and part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = torch.tanh(self.layers[0](x))
        y = early
        for layer in self.layers[1:]:
            y = torch.tanh(layer(y))
        return {"early": early, "late": [y, x], "kind": "pair"}


class TupleLayers(nn.Module):
    """Each layer returns a tuple, of which one part skips a layer."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 12)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            left, right = self.linear(pair[0]).chunk(2, dim=1)
            return torch.tanh(left + pair[1]), torch.sigmoid(right)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TupleLayers.Layer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, x)
        for layer in self.layers:
            pair = layer(pair)
        return pair[0] * pair[1]


class NoParametersFirst(nn.Module):
    """The first layer has no parameters and reads the float input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Tanh()
        self.layers = _linears(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class FrozenMiddle(nn.Module):
    """A layer in the middle is frozen: it passes gradients on and keeps none."""

    def __init__(self, frozen: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.layers = _linears(3)
        for number in frozen:
            self.layers[number].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class IntAndBool(nn.Module):
    """Ints and bools that depend on weights cross cuts, next to a float without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)
        self.table = nn.Embedding(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        best, positive, constant = x.argmax(dim=1), x > 0, x.detach()
        x = torch.tanh(self.layers[1](x))
        x = torch.tanh(self.layers[2](x))
        x = torch.where(positive, x, 0.1 * x) + self.table(best)
        return self.layers[3](x) + constant


class NoRows(nn.Module):
    """A tensor made of parameters only, the same for every row, crosses cuts with gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = _linears(3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        scale = self.first.weight.softmax(0).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
        return x


class RowsInDimOne(nn.Module):
    """[T, B, D] between the layers, as recurrent nets have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (3, 2)).permute(1, 0, 2)  # [3, B, 2]
        x = torch.cat([x, x.roll(1, 0), x.roll(2, 0)], dim=2)  # [3, B, 6]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.permute(1, 0, 2).flatten(1)[:, :6]


class ViewsCross(nn.Module):
    """Slices and transposes of one tensor cross different cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.layers[0](x)
        left, right = wide[:, :3], wide[:, 3:]
        x = torch.tanh(self.layers[1](wide.unflatten(1, (2, 3)).transpose(1, 2).flatten(1)))
        x = torch.tanh(self.layers[2](torch.cat([x[:, :3], left], dim=1)))
        return self.layers[3](torch.cat([x[:, 3:], right], dim=1))


class UnusedParameter(nn.Module):
    """A parameter and a buffer that the forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(3)
        self.spare = nn.Parameter(torch.randn(5))
        self.register_buffer("old", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class InPlace(nn.Module):
    """In-place operators on a layer's input, on its output, and on a residual branch."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y += x
            return self.relu(y.mul_(0.5)) * 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InPlace.Block() for _ in range(3)])
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.add_(0.1)
        return self.head(x)


class InPlaceAcross(nn.Module):
    """A layer writes into a tensor that an earlier layer made and a later one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.tanh(self.layers[0](x))
        total = torch.zeros_like(kept)
        total += kept
        x = self.layers[1](kept)
        total += x
        x = torch.tanh(self.layers[2](x)) + total
        return self.layers[3](x)


class Normed(nn.Module):
    """BatchNorm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))
                for _ in range(3)
            ]
        )
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Dropped(nn.Module):
    """Dropout in every layer."""

    def __init__(self, probability: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(probability)) for _ in range(3)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Masked(nn.Module):
    """A mask and positions computed from integer inputs and used by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)
        self.register_buffer("places", torch.arange(6))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = self.places < lengths.unsqueeze(1)
        for layer in self.layers:
            x = torch.tanh(layer(x)).masked_fill(~mask, 0.0)
        return x


class OtherInTraining(nn.Module):
    """Computes more in training than in evaluation, and returns more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.layers[0](x))
        if self.training:
            x = x + 0.1 * x * x
        x = torch.tanh(self.layers[1](x))
        auxiliary = x
        x = torch.tanh(self.layers[2](x))
        if not self.training:
            return self.layers[3](x)
        return self.layers[3](x), auxiliary


class ReturnsParameter(nn.Module):
    """One of the outputs is a parameter itself, which an early layer reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(3)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.layers[0](x)) * self.scale
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x, self.scale


class Recurrent(nn.Module):
    """LSTM layers, whose node returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(2, 2, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (3, 2))
        for layer in self.layers:
            x = layer(x)[0]
        return x.flatten(1)


class Regions(nn.Module):
    """no_grad and autocast regions inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        with torch.no_grad():
            scale = x.abs().amax(dim=1, keepdim=True) + 1
        x = torch.tanh(self.layers[1](x / scale))
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.layers[2](x * scale))


def _mean_square(output: Any, target: Any) -> Tensor:
    return F.mse_loss(output, target)


def _early_loss(output: Any, target: Any) -> Tensor:
    late, x = output["late"]
    return F.mse_loss(late, target) + output["early"].square().mean() + 0.1 * (x * late).mean()


def _first(output: Any, target: Any) -> Tensor:
    if isinstance(output, tuple):
        return F.mse_loss(output[0], target) + 0.3 * output[1].square().mean()
    return F.mse_loss(output, target)


def _floats(rows: int, random: torch.Generator) -> Tensor:
    return torch.randn(rows, 6, dtype=torch.float64, generator=random)


def _with_lengths(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    return _floats(rows, random), torch.randint(1, 7, (rows,), generator=random)


def _tokens(rows: int, random: torch.Generator) -> Tensor:
    return torch.randint(0, 16, (rows, 5), generator=random)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in float64 with a batch for it.

    Attributes:
        make: the model.
        layers: how many layers the capture finds.
        loss: its loss function.
        inputs, targets: (rows, random numbers) -> a batch.
    """

    make: Callable[[], nn.Module]
    layers: int
    loss: Callable[[Any, Any], Tensor] = _mean_square
    inputs: Callable[[int, torch.Generator], Any] = _floats
    targets: Callable[[int, torch.Generator], Any] = _floats

    def model(self, seed: int = 3) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().double()

    def batch(self, rows: int, seed: int = 0) -> tuple[Any, Any]:
        # A generator of its own: ranks that are threads share the global one.
        random = torch.Generator().manual_seed(1000 + seed)
        return self.inputs(rows, random), self.targets(rows, random)


CASES = {
    "mlp": Case(lambda: MLP(6, 6, 6, 3), 4),
    "gpt": Case(
        lambda: GPT(vocab=16, width=8, layers=2, heads=2, context=5),
        6,
        next_byte_loss,
        _tokens,
        _tokens,
    ),
    "skip": Case(lambda: SkipNet(width=6, layers=6, outputs=6), 8, inputs=_with_lengths),
    "called twice": Case(CalledTwice, 5),
    "two names": Case(TwoNames, 4),
    "early output": Case(EarlyOutput, 4, _early_loss),
    "tuple layers": Case(TupleLayers, 3),
    "no parameters first": Case(NoParametersFirst, 4),
    "frozen middle": Case(FrozenMiddle, 3),
    "frozen first": Case(lambda: FrozenMiddle((0,)), 3),
    "frozen last": Case(lambda: FrozenMiddle((1, 2)), 3),
    "int and bool": Case(IntAndBool, 5),
    "no rows": Case(NoRows, 4),
    "rows in dim one": Case(RowsInDimOne, 3),
    "views cross": Case(ViewsCross, 4),
    "unused parameter": Case(UnusedParameter, 3),
    "in place": Case(InPlace, 4),
    "in place across": Case(InPlaceAcross, 4),
    "normed": Case(Normed, 4),
    "masked": Case(Masked, 4, inputs=_with_lengths),
    "other in training": Case(OtherInTraining, 4, _first),
    "returns parameter": Case(ReturnsParameter, 3, _first),
    "recurrent": Case(Recurrent, 2),
    "regions": Case(Regions, 2),
}
