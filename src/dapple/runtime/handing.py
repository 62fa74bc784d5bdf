"""From what the user hands to a rank to the rows that its stages read."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dapple.errors import InputError
from dapple.graph import LayerGraph
from dapple.runtime.batch import Batch, check_targets
from dapple.runtime.layout import Layout
from dapple.runtime.parts import Parts
from dapple.runtime.topology import Topology
from dapple.runtime.window import Handed, Window, own_parts


class Hands:
    """Takes global batches, whole or only the rows of one rank.

    Args:
        graph: the captured model.
        topology: this rank's place.
        parts: its stages.
        device: where the inputs go.
    """

    def __init__(
        self, graph: LayerGraph, topology: Topology, parts: Parts, device: torch.device
    ) -> None:
        self._graph = graph
        self._topology = topology
        self._reads = parts.training.reads_inputs | parts.evaluation.reads_inputs
        self._batched = frozenset(spec.name for spec in graph.inputs if spec.batched)
        self._device = device

    def own_rows(self, global_batch_size: int) -> list[int]:
        """The rows of a global batch that this rank reads, ascending; row 0 if it reads none."""
        if not (self._topology.is_last or self._reads & self._batched):
            return [0]
        parts = own_parts(self._layout(global_batch_size, ()))
        return [row for start, stop in parts for row in range(start, stop)] or [0]

    def take(self, inputs: Any, targets: Any, global_batch_size: int | None = None) -> Handed:
        """Look at a batch.

        Args:
            inputs, targets: as for `Trainer.step`.
            global_batch_size: they hold the rows of `own_rows` only; None: they hold all rows.

        Raises:
            InputError: they do not fit the captured model, or have other rows.
        """
        named = self._graph.flatten_inputs(inputs)
        lengths = tuple(self._graph.lengths_of(named).items())
        rows = self._graph.batch_size(named)
        check_targets(targets, rows)
        if global_batch_size is None:
            return Handed(inputs, targets, named, self._layout(rows, lengths), Window())
        if global_batch_size < 1:
            raise InputError(f"global_batch_size is {global_batch_size}; it must be at least 1")
        wanted = self.own_rows(global_batch_size)
        if rows != len(wanted):
            raise InputError(
                f"rank {self._topology.rank} was handed {rows} rows but reads {len(wanted)} of a "
                f"global batch of {global_batch_size}; hand it those of `own_rows`, or all without "
                "global_batch_size"
            )
        layout = self._layout(global_batch_size, lengths)
        return Handed(inputs, targets, named, layout, Window(own_parts(layout)))

    def batch(self, handed: Handed) -> Batch:
        """The inputs that this rank's stages read, on its device."""
        placed = {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value
            for name, value in handed.named.items()
            if name in self._reads
        }
        return Batch(placed, self._batched, handed.window)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - lives as long as its trainer
    def _layout(self, global_batch_size: int, lengths: tuple[tuple[str, int], ...]) -> Layout:
        return Layout(self._topology, global_batch_size, dict(lengths))
