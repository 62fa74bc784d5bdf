"""Costs of layers as arrays, whatever the number of micro-batches: seconds and bytes up to each cut."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dapple.costs.model import BUCKET_BYTES, MOST_BUCKETS
from dapple.planner.traffic import CutBytes, Floats, certain_bytes, crossing_bytes
from dapple.records import ModelProfile

Ints = NDArray[np.int64]
Index = int | Ints


class LayerTables:
    """Seconds and bytes of the N layers of a profile.

    Args:
        profile: the model's costs.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self._layer_seconds: dict[float, tuple[Floats, Floats]] = {}
        self._saved: dict[int, Floats] = {}

    @cached_property
    def certain_bytes(self) -> CutBytes:
        """What certainly travels between the two stages at each cut."""
        return certain_bytes(self.profile)

    @cached_property
    def crossing_bytes(self) -> CutBytes:
        """All that crosses each cut."""
        return crossing_bytes(self.profile)

    @cached_property
    def have_statistics(self) -> bool:
        """Whether batch norms add up anything over the replicas of a stage."""
        return any(layer.statistics_bytes for layer in self.profile.layers)

    @cached_property
    def linked(self) -> NDArray[np.bool_]:
        """Per cut, whether the layer before it hands a tensor with gradient to the one behind.

        Where it does not, the stages on both sides may not wait for each other at all. A profile
        without tensors is a chain.
        """
        linked = np.full(self.profile.num_layers + 1, not self.profile.tensors)
        for tensor in self.profile.tensors:
            if tensor.producer >= 0 and tensor.needs_grad:
                linked[tensor.producer + 1] |= tensor.producer + 1 in tensor.consumers
        return linked

    @cached_property
    def parameter_prefix(self) -> Floats:
        """Parameter bytes of the layers before each cut, tied ones counted at every holder."""
        return prefix([layer.parameter_bytes for layer in self.profile.layers])

    @cached_property
    def untied_prefix(self) -> Floats:
        """Parameter bytes before each cut that only the layer's own stage adds up, wherever cut."""
        sizes = [layer.parameter_bytes for layer in self.profile.layers]
        for group in self.profile.tied:
            for layer in {member.layer for member in group.members}:
                sizes[layer] = max(0, sizes[layer] - group.parameter_bytes)
        return prefix(sizes)

    @cached_property
    def optimizer_prefix(self) -> Floats:
        """Optimizer seconds of the layers before each cut."""
        return prefix([layer.optimizer_seconds for layer in self.profile.layers])

    def layer_seconds(self, rows: float) -> tuple[Floats, Floats]:
        """Prefix sums of the layers' forward and backward seconds at so many rows."""
        found = self._layer_seconds.get(rows)
        if found is None:
            sizes = self.profile.batch_sizes
            forward, backward = (prefix(all_at(sizes, v, rows)) for v in self._measured)
            found = self._layer_seconds[rows] = forward, backward
        return found

    @cached_property
    def _measured(self) -> tuple[Floats, Floats]:
        layers = self.profile.layers
        return (
            np.array([layer.forward_seconds for layer in layers]),
            np.array([layer.backward_seconds for layer in layers]),
        )

    def saved_prefix(self, rows: int) -> Floats:
        """Prefix sums of the bytes that layers keep for the backward; 0 where not measured."""
        found = self._saved.get(rows)
        if found is None:
            found = prefix(all_bytes_at(self.profile.batch_sizes, self._measured_bytes, rows))
            self._saved[rows] = found
        return found

    @cached_property
    def _measured_bytes(self) -> Floats:
        none = (0,) * len(self.profile.batch_sizes)
        return np.array([layer.saved_bytes or none for layer in self.profile.layers], dtype=float)

    def stage_bytes(
        self, start: Index, stop: Index, rows: int, optimizer_state_factor: float
    ) -> tuple[Floats, Floats]:
        """About the bytes of a replica: what is there once, and for each micro-batch in flight."""
        saved, crossing = self.saved_prefix(rows), self.crossing_bytes
        parameters = self.parameter_prefix[stop] - self.parameter_prefix[start]
        into = rows * crossing.forward.per_row[start] + crossing.forward.fixed[start]
        into = into + rows * crossing.backward.per_row[start] + crossing.backward.fixed[start]
        back = rows * crossing.backward.per_row[stop] + crossing.backward.fixed[stop]
        once = (2 + optimizer_state_factor) * parameters + into + 2 * back
        return once, saved[stop] - saved[start] + into

    def own_parameter_bytes(self, start: Ints, stop: Ints) -> Floats:
        """Bytes of the gradients that only the stage's own replicas add up.

        Tied parameters with a holder outside of the stage go into an AllReduce of their own.
        """
        own = self.parameter_prefix[stop] - self.parameter_prefix[start]
        for group, holders in self._tied:
            inside = holders[stop] - holders[start]
            own = own - group * np.where(inside == holders[-1], inside - 1, inside)
        return own

    def fewest_buckets(self, own: Floats) -> Floats:
        """How many AllReduces the gradients of a stage are at least cut into (rule 7), by bytes.

        Without its last layer a bucket is not full.
        """
        largest = max(layer.parameter_bytes for layer in self.profile.layers)
        full = np.maximum(BUCKET_BYTES, own / MOST_BUCKETS) + largest
        fewest: Floats = np.maximum(np.ceil(own / full * (1 - 1e-12)), 1.0)
        return fewest

    @cached_property
    def _tied(self) -> list[tuple[int, Ints]]:
        groups = []
        for group in self.profile.tied:
            holds = np.zeros(self.profile.num_layers, dtype=np.int64)
            holds[[member.layer for member in group.members]] = 1
            groups.append((group.parameter_bytes, np.concatenate([[0], np.cumsum(holds)])))
        return groups


def all_at(sizes: Sequence[int], values: Floats, rows: float) -> Floats:
    """`dapple.costs.seconds_at` for all layers at once: values (N, sizes) -> seconds (N,)."""
    if rows <= 0:
        return np.zeros(len(values))
    if len(sizes) > 1 and rows <= sizes[0]:
        return values[:, 0]
    if len(sizes) == 1 or rows >= sizes[-1]:
        scaled: Floats = values[:, -1] * (rows / sizes[-1])
        return scaled
    right = max(bisect.bisect_left(sizes, rows), 1)
    weight = (rows - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    line: Floats = values[:, right - 1] + (values[:, right] - values[:, right - 1]) * weight
    return line


def all_bytes_at(sizes: Sequence[int], values: Floats, rows: int) -> Floats:
    """`dapple.costs.bytes_at` for all layers at once: values (N, sizes) -> bytes (N,)."""
    if rows <= 0:
        return np.zeros(len(values))
    if len(sizes) == 1:
        scaled: Floats = values[:, 0] * (rows / sizes[0])
        return scaled
    right = min(max(bisect.bisect_left(sizes, rows), 1), len(sizes) - 1)
    weight = (rows - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    line: Floats = values[:, right - 1] + (values[:, right] - values[:, right - 1]) * weight
    return np.maximum(line, 0.0)


def prefix(values: Sequence[float] | Floats) -> Floats:
    """Sums over the layers before each cut, shape (..., N) -> (..., N + 1)."""
    values = np.asarray(values, dtype=np.float64)
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums
