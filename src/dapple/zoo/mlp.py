"""A multi-layer perceptron: the smallest model worth cutting."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class MLP(nn.Module):
    """Linear, GELU, Linear, GELU, ..., Linear, without an activation at the end.

    Args:
        inputs: features of an input row.
        width: features of every hidden layer.
        outputs: features of an output row.
        hidden: number of hidden layers, >= 0; there is one Linear more than that.
    """

    def __init__(
        self, inputs: int = 32, width: int = 64, outputs: int = 16, hidden: int = 5
    ) -> None:
        super().__init__()
        sizes = [inputs, *[width] * hidden, outputs]
        modules: list[nn.Module] = []
        for size, next_size in itertools.pairwise(sizes):
            modules += [nn.Linear(size, next_size), nn.GELU()]
        self.layers = nn.Sequential(*modules[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs] -> [B, outputs]."""
        y: Tensor = self.layers(x)
        return y


def mean_squared_error(output: Tensor, targets: Tensor) -> Tensor:
    """Mean over all rows and features of (output - targets)^2; both [B, outputs]."""
    return F.mse_loss(output, targets)
