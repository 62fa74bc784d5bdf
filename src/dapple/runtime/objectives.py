"""Makes the objective of each step: whose loss, over which pieces, with which weights."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dapple.graph import LayerGraph
from dapple.graph.precision import Precision
from dapple.runtime.batch import (
    LossOfResults,
    Objective,
    Probe,
    WeightFunction,
    loss_mixes_rows,
    piece_weights,
    rows_of,
)
from dapple.runtime.metrics import Metric, MetricSums
from dapple.runtime.process import random_state_kept
from dapple.runtime.transport import Transport
from dapple.runtime.window import Handed


class Objectives:
    """Makes objectives on a rank that computes the loss.

    Args:
        graph: the captured model.
        weight: w_i of a piece from its (inputs, targets); None: rows.
        device: this rank's device.
        transport: the network.
        ranks: those that compute the loss.
        precision: in which it is computed.
        metrics: computed beside the loss where asked for.
    """

    def __init__(
        self,
        graph: LayerGraph,
        weight: WeightFunction | None,
        device: torch.device,
        transport: Transport,
        ranks: tuple[int, ...],
        precision: Precision,
        metrics: Mapping[str, Metric],
    ) -> None:
        self._graph = graph
        self._weight = weight
        self._device = device
        self._transport = transport
        self._ranks = ranks
        self._precision = precision
        self._metrics = metrics
        self._loss_is_known = graph.loss is None

    def make(
        self,
        handed: Handed,
        *,
        training: bool,
        scale: float = 1.0,
        metrics: bool = False,
    ) -> Objective:
        """The objective of one global batch; starts adding up its weights.

        Args:
            handed: what this rank has of it.
            training: or evaluation.
            scale: of the loss in the backward.
            metrics: compute them too.
        """

        def own_targets(where: slice) -> Any:
            return rows_of(handed.targets, handed.window.local(where))

        def inputs_of(where: slice) -> Any:
            return self._graph.rows_of_inputs(handed.inputs, handed.window.local(where))

        def targets_of(where: slice) -> Any:
            piece = own_targets(where)
            if isinstance(piece, torch.Tensor):
                return piece.to(self._device)
            return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self._device), piece)

        weights = piece_weights(handed.layout, self._weight, inputs_of, own_targets)
        total = torch.tensor(sum(weights.values()), dtype=torch.float64).to(self._device)
        pending = self._transport.sum(total, self._ranks)
        loss_of = functools.partial(self._loss_of, training)
        probe = None
        if not self._loss_is_known:
            self._loss_is_known = True
            probe = self._probe(loss_of, inputs_of, own_targets)
        ready = functools.cache(pending.wait)
        sums = None
        if metrics and self._metrics:
            output_of = functools.partial(self._graph.unflatten_outputs, training=training)
            sums = MetricSums(self._metrics, output_of)
        return Objective(loss_of, targets_of, weights, total, ready, probe, scale, sums)

    def _loss_of(self, training: bool, results: tuple[Any, ...], targets: Any) -> torch.Tensor:
        with self._precision.forward():
            return self._graph.loss_of_results(results, targets, training=training)

    def _probe(
        self,
        loss_of: LossOfResults,
        inputs_of: Callable[[slice], Any],
        targets_of: Callable[[slice], Any],
    ) -> Probe:
        def weight_of(where: slice) -> float:
            if self._weight is None:
                return float(where.stop - where.start)
            return float(self._weight(inputs_of(where), targets_of(where)))

        def probe(rows: slice, results: Any, piece_targets: Any, loss: torch.Tensor) -> None:
            with random_state_kept(self._device):
                mixes = loss_mixes_rows(loss_of, weight_of, rows, results, piece_targets, loss)
            if mixes:
                warnings.warn(
                    "the loss is no mean over rows, or not over what `weight` counts: micro-batches "
                    "and replicas give other gradients than the whole batch",
                    stacklevel=2,
                )

        return probe
