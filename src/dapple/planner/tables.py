"""Costs of every possible stage as arrays, so that a search can look at thousands of plans at once.

A stage over the layers i..j takes prefix[j] - prefix[i] seconds, for each of a few prefix sums; a
transfer over the cut before layer j takes the j-th entry of an array. The simulator, not this
module, decides what a plan costs in the end: these are times without contention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dapple.costs import NO_CARD, Network, overlaps, seconds_at, split_rows
from dapple.records import ModelProfile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Devices = tuple[int, ...]


@dataclass(frozen=True)
class StageTable:
    """One device set as a stage, over all layer ranges. Prefix sums of shape (N + 1,), seconds.

    Attributes:
        forward: of the first (largest) micro-batch, on the quickest replica that has rows.
        backward: of the last (smallest) micro-batch, on the quickest replica that has rows.
        work: forwards and backwards of all micro-batches on the busiest replica.
        optimizer: update of the parameters on the slowest device.
        reduce_fixed: AllReduce seconds that do not depend on the bytes.
        reduce_per_byte: AllReduce seconds for each byte of parameters.
    """

    forward: Floats
    backward: Floats
    work: Floats
    optimizer: Floats
    reduce_fixed: float
    reduce_per_byte: float


@dataclass(frozen=True)
class LinkTable:
    """The transfer between two adjacent stages, by cut; shape (N + 1,), seconds.

    Attributes:
        forward: activations of the first micro-batch, to the replica that has its rows first.
        backward: gradients of the last micro-batch, likewise.
        work: the whole step on the busiest flow or network card.
    """

    forward: Floats
    backward: Floats
    work: Floats


class CostTables:
    """Stage and transfer times for one profile, cluster and number of micro-batches.

    Args:
        profile: N layers.
        network: routes and rings of the cluster.
        global_batch_size: rows of a step.
        micro_batches: M <= global_batch_size.
    """

    def __init__(
        self, profile: ModelProfile, network: Network, global_batch_size: int, micro_batches: int
    ) -> None:
        self.profile = profile
        self.network = network
        self.micro_batches = micro_batches
        sizes = split_rows(global_batch_size, micro_batches)
        self.first_rows, self.last_rows = sizes[0], sizes[-1]
        self.num_first = sizes.count(sizes[0])
        self._kinds = network.cluster.kind_of_device()
        self._layer_seconds: dict[int, tuple[Floats, Floats]] = {}
        self._stages: dict[Devices, StageTable] = {}
        self._links: dict[tuple[Devices, Devices], LinkTable] = {}

    @cached_property
    def cut_bytes(self) -> CutBytes:
        """Bytes that certainly cross each cut."""
        return cut_bytes(self.profile)

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
        return _prefix([layer.parameter_bytes for layer in self.profile.layers])

    @cached_property
    def optimizer_prefix(self) -> Floats:
        """Optimizer seconds of the layers before each cut."""
        return _prefix([layer.optimizer_seconds for layer in self.profile.layers])

    def layer_seconds(self, rows: int) -> tuple[Floats, Floats]:
        """Prefix sums of the layers' forward and backward seconds at so many rows."""
        found = self._layer_seconds.get(rows)
        if found is None:
            sizes, layers = self.profile.batch_sizes, self.profile.layers
            found = (
                _prefix([seconds_at(sizes, layer.forward_seconds, rows) for layer in layers]),
                _prefix([seconds_at(sizes, layer.backward_seconds, rows) for layer in layers]),
            )
            self._layer_seconds[rows] = found
        return found

    def stage(self, devices: Devices) -> StageTable:
        """The table of a stage on these devices."""
        found = self._stages.get(devices)
        if found is None:
            found = self._stages[devices] = self._make_stage(devices)
        return found

    def link(self, senders: Devices, receivers: Devices) -> LinkTable:
        """The table of the transfer between adjacent stages on these devices."""
        key = senders, receivers
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = self._make_link(senders, receivers)
        return found

    def own_parameter_bytes(self, start: Ints, stop: Ints) -> Floats:
        """Bytes of the gradients that only the stage's own replicas add up.

        Tied parameters with a holder outside of the stage go into an AllReduce of their own.
        """
        own = self.parameter_prefix[stop] - self.parameter_prefix[start]
        for group, holders in self._tied:
            inside = holders[stop] - holders[start]
            own = own - group * np.where(inside == holders[-1], inside - 1, inside)
        return own

    @cached_property
    def _tied(self) -> list[tuple[int, Ints]]:
        groups = []
        for group in self.profile.tied:
            holds = np.zeros(self.profile.num_layers, dtype=np.int64)
            holds[[member.layer for member in group.members]] = 1
            groups.append((group.parameter_bytes, np.concatenate([[0], np.cumsum(holds)])))
        return groups

    def _make_stage(self, devices: Devices) -> StageTable:
        speeds = [self._kinds[device].speed for device in devices]
        first, last = (split_rows(n, len(devices)) for n in (self.first_rows, self.last_rows))
        num_last = self.micro_batches - self.num_first
        forward, backward = (np.full(self.profile.num_layers + 1, np.inf) for _ in range(2))
        work = np.zeros(self.profile.num_layers + 1)
        for speed, a, b in sorted(set(zip(speeds, first, last, strict=True))):
            seconds_a, seconds_b = self.layer_seconds(a), self.layer_seconds(b)
            both = self.num_first * sum(seconds_a) + num_last * sum(seconds_b)
            work = np.maximum(work, both / speed)
            forward = np.minimum(forward, seconds_a[0] / speed) if a else forward
            backward = np.minimum(backward, seconds_b[1] / speed) if b else backward
        ring = self.network.ring(devices)
        between = [(r.latency, ring.between_factor / r.rate) for r in ring.between]
        return StageTable(
            forward=forward,
            backward=backward,
            work=work,
            optimizer=self.optimizer_prefix / min(speeds),
            reduce_fixed=ring.inside_latency + max((a for a, _ in between), default=0.0),
            reduce_per_byte=ring.inside_seconds_per_byte
            + max((b for _, b in between), default=0.0),
        )

    def _make_link(self, senders: Devices, receivers: Devices) -> LinkTable:
        crossing, num_last = self.cut_bytes, self.micro_batches - self.num_first
        there, back = crossing.forward, crossing.backward
        sizes = (self.first_rows, self.num_first), (self.last_rows, num_last)
        work = np.zeros(self.profile.num_layers + 1)
        for ends, size in (((senders, receivers), there), ((receivers, senders), back)):
            first, last = (_traffic(self.network, *ends, rows) for rows, _ in sizes)
            work = np.maximum(work, _busiest(first, self.num_first, last, num_last, size))
        return LinkTable(
            forward=_arrival(self.network, senders, receivers, self.first_rows, there),
            backward=_arrival(self.network, receivers, senders, self.last_rows, back),
            work=work,
        )


@dataclass(frozen=True)
class MessageBytes:
    """Bytes of a message, by cut, shape (N + 1,): for each row, and whatever the rows."""

    per_row: Floats
    fixed: Floats


@dataclass(frozen=True)
class CutBytes:
    """What the layer before each cut hands to the layer behind it, and the gradients back."""

    forward: MessageBytes
    backward: MessageBytes


def cut_bytes(profile: ModelProfile) -> CutBytes:
    """Bytes that certainly travel between the two stages at each cut, whatever the other cuts.

    Those are the tensors that the layer before the cut makes and the layer behind it reads.
    """
    sums = np.zeros((4, profile.num_layers + 1))
    for tensor in profile.tensors:
        cut = tensor.producer + 1
        if tensor.producer >= 0 and cut in tensor.consumers:
            sizes = np.array([tensor.bytes_per_sample, tensor.fixed_bytes])
            sums[:, cut] += np.concatenate([sizes, sizes * tensor.needs_grad])
    return CutBytes(MessageBytes(sums[0], sums[1]), MessageBytes(sums[2], sums[3]))


Load = tuple[int, int, float, float]
"""Rows, number of messages, bytes per second, and latency of a flow or a network card."""


def _traffic(
    network: Network, senders: Devices, receivers: Devices, rows: int
) -> dict[tuple[int, int], Load]:
    """What one micro-batch puts on each flow (by replicas) and each card (by (-1, card))."""
    loads: dict[tuple[int, int], Load] = {}
    parts = split_rows(rows, len(senders)), split_rows(rows, len(receivers))
    for sender, receiver, count in overlaps(*parts):
        route = network.route(senders[sender], receivers[receiver])
        loads[sender, receiver] = count, 1, route.rate, route.latency
        for card in (route.out_card, route.in_card):
            if card != NO_CARD:
                total, flows, *_ = loads.get((-1, card), (0, 0, 0.0, 0.0))
                loads[-1, card] = total + count, flows + 1, network.card_bandwidth(card), 0.0
    return loads


def _busiest(
    first: dict[tuple[int, int], Load],
    num_first: int,
    last: dict[tuple[int, int], Load],
    num_last: int,
    size: MessageBytes,
) -> Floats:
    """Seconds of the busiest flow or card when both sizes of micro-batches are through."""
    work = np.zeros_like(size.per_row)
    for key in first.keys() | last.keys():
        seconds = np.zeros_like(work)
        for loads, times in ((first, num_first), (last, num_last)):
            if key in loads:
                seconds += times * _seconds(loads[key], size)
        work = np.maximum(work, seconds)
    return work


def _arrival(
    network: Network, senders: Devices, receivers: Devices, rows: int, size: MessageBytes
) -> Floats:
    """Seconds until the first receiver has all of its rows."""
    waits: dict[int, Floats] = {}
    for (sender, receiver), load in _traffic(network, senders, receivers, rows).items():
        if sender >= 0:
            seconds = _seconds(load, size)
            waits[receiver] = np.maximum(waits.get(receiver, seconds), seconds)
    soonest: Floats = np.minimum.reduce(list(waits.values()))
    return soonest


def _seconds(load: Load, size: MessageBytes) -> Floats:
    rows, messages, rate, latency = load
    sent = rows * size.per_row + messages * size.fixed
    seconds: Floats = np.where(sent > 0, latency + sent / rate, 0.0)
    return seconds


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
