"""The user's own numbers beside the loss, summed over pieces by the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dapple.errors import InputError

Metric = Callable[[Any, Any], "float | torch.Tensor"]


class MetricSums:
    """sum_i w_i metric_i / sum_i w_i over this rank's pieces of a batch, per metric.

    Args:
        metrics: (output, targets) of a piece -> a number, by name.
        output_of: the model's output from its flat results.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], output_of: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._metrics = metrics
        self._output_of = output_of
        self.shares = dict.fromkeys(metrics, 0.0)

    def add(self, results: Sequence[Any], targets: Any, share: float) -> None:
        """Take a piece.

        Args:
            results: the model's flat outputs.
            targets: the piece's targets.
            share: its weight over that of the batch.

        Raises:
            InputError: a metric is no number.
        """
        output = self._output_of(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results))
        with torch.no_grad():
            for name, metric in self._metrics.items():
                self.shares[name] += share * _number(name, metric(output, targets))


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise InputError(
        f'metric "{name}" returned {shape} instead of a number; return the mean over the rows of '
        "the piece, or over what `weight` counts"
    )
