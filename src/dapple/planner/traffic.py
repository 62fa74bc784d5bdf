"""Bytes over cuts, and the seconds that flows and network cards need for them, without contention."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dapple.costs import NO_CARD, Network, overlaps
from dapple.records import ModelProfile, TensorProfile

Floats = NDArray[np.float64]
Devices = tuple[int, ...]
Rows = tuple[int, ...]
"""Rows of a micro-batch per replica."""
_overlaps = functools.lru_cache(maxsize=256)(overlaps)
_FEW = 24
"""With so few replicas on both sides, flows are looked at one by one."""


@dataclass(frozen=True)
class MessageBytes:
    """Bytes of a message, by cut, shape (N + 1,): for each row, and whatever the rows."""

    per_row: Floats
    fixed: Floats


@dataclass(frozen=True)
class CutBytes:
    """What crosses each cut, and the gradients back."""

    forward: MessageBytes
    backward: MessageBytes

    @cached_property
    def alike(self) -> bool:
        """Whether gradients are as large as activations at every cut."""
        there, back = self.forward, self.backward
        rows = np.array_equal(there.per_row, back.per_row)
        return rows and np.array_equal(there.fixed, back.fixed)


def certain_bytes(profile: ModelProfile) -> CutBytes:
    """Bytes that travel between the two stages at each cut, whatever the other cuts.

    Those are the tensors that the layer before the cut makes and the layer behind it reads.
    """
    sums = np.zeros((4, profile.num_layers + 1))
    for tensor in profile.tensors:
        cut = tensor.producer + 1
        if tensor.producer >= 0 and cut in tensor.consumers:
            sums[:, cut] += _sizes(tensor)
    return CutBytes(MessageBytes(sums[0], sums[1]), MessageBytes(sums[2], sums[3]))


def crossing_bytes(profile: ModelProfile) -> CutBytes:
    """Bytes of all tensors that are made before each cut and read behind it.

    A tensor that skips stages counts at every cut on its way. Inputs of the model are at hand on
    every rank.
    """
    sums = np.zeros((4, profile.num_layers + 1))
    for tensor in profile.tensors:
        if tensor.producer >= 0 and tensor.consumers:
            sums[:, tensor.producer + 1 : max(tensor.consumers) + 1] += _sizes(tensor)[:, None]
    return CutBytes(MessageBytes(sums[0], sums[1]), MessageBytes(sums[2], sums[3]))


def _sizes(tensor: TensorProfile) -> Floats:
    sizes = np.array([tensor.bytes_per_sample, tensor.fixed_bytes])
    return np.concatenate([sizes, sizes * tensor.needs_grad])


Load = tuple[int, int, float, float]
"""Rows, number of messages, bytes per second, and latency of a flow or a network card."""


@dataclass(frozen=True)
class Places:
    """Where devices are.

    Attributes:
        machine_of: shape (G,), machine of each device.
        group_of: shape (machines,), the first machine that is equal to this one.
    """

    machine_of: NDArray[np.int64]
    group_of: NDArray[np.int64]


def link_loads(
    network: Network, places: Places, ends: tuple[Devices, Devices], rows: tuple[Rows, Rows]
) -> tuple[Load, ...]:
    """What one micro-batch puts on flows and cards, alike ones once, less than others left out.

    Args:
        network: routes and cards, which are the same both ways.
        places: machines, and groups of equal machines.
        ends: senders and receivers.
        rows: what of the micro-batch each of them has.
    """
    few = len(ends[0]) + len(ends[1]) <= _FEW
    loads = (_loads_of_few if few else _loads_of_many)(network, places, ends, rows)
    most: dict[tuple[int, float, float], int] = {}
    for count, messages, rate, latency in loads:
        key = messages, rate, latency
        most[key] = max(count, most.get(key, 0))
    return tuple(sorted((count, *key) for key, count in most.items()))


def transfer_seconds(loads: Sequence[Load], sizes: CutBytes) -> tuple[Floats, Floats]:
    """Seconds of one micro-batch's transfer until the last flow is through, and of that back.

    Args:
        loads: as `link_loads` has them.
        sizes: bytes by cut.
    """
    most, messages, rate, latency = np.array(loads).T[:, :, None]

    def seconds(size: MessageBytes) -> Floats:
        sent = most * size.per_row + messages * size.fixed
        longest: Floats = np.where(sent > 0, latency + sent / rate, 0.0).max(axis=0)
        return longest

    there = seconds(sizes.forward)
    return there, there if sizes.alike else seconds(sizes.backward)


def _loads_of_few(
    network: Network, places: Places, ends: tuple[Devices, Devices], rows: tuple[Rows, Rows]
) -> Iterable[Load]:
    del places  # Each flow is looked at on its own.
    return traffic(network, *ends, rows).values()


def _loads_of_many(
    network: Network, places: Places, ends: tuple[Devices, Devices], rows: tuple[Rows, Rows]
) -> Iterable[Load]:
    """Alike ones once."""
    until = [np.cumsum(side) for side in rows]
    stops = np.sort(np.concatenate(until))
    stops = stops[np.diff(stops, prepend=0) > 0]
    counts = np.diff(stops, prepend=0)
    source, target = (np.searchsorted(side, stops, side="left") for side in until)
    here, there = np.array(ends[0])[source], np.array(ends[1])[target]
    machines = places.machine_of[here], places.machine_of[there]
    groups = places.group_of[machines[0]], places.group_of[machines[1]]
    outside = machines[0] != machines[1]
    kinds = (groups[0] * len(places.group_of) + groups[1]) * 2 + outside
    loads: set[Load] = set()
    for kind in set(kinds.tolist()):
        flows = np.flatnonzero(kinds == kind)
        route = network.route(int(here[flows[0]]), int(there[flows[0]]))
        loads.add((int(counts[flows].max()), 1, route.rate, route.latency))
    if network.model == "paper":
        return loads
    for direction, side in enumerate(machines):
        total = np.bincount(side[outside], weights=counts[outside])
        flows = np.bincount(side[outside])
        used = np.flatnonzero(flows)
        figures = (places.group_of[used], total[used], flows[used])
        for group, most, messages in set(zip(*(f.tolist() for f in figures), strict=True)):
            bandwidth = network.card_bandwidth(2 * group + direction)
            loads.add((int(most), messages, bandwidth, 0.0))
    return loads


def traffic(
    network: Network, senders: Devices, receivers: Devices, rows: tuple[Rows, Rows]
) -> dict[tuple[int, int], Load]:
    """What one micro-batch puts on each flow (by replicas) and each card (by (-1, card))."""
    loads: dict[tuple[int, int], Load] = {}
    for sender, receiver, count in _overlaps(*rows):
        route = network.route(senders[sender], receivers[receiver])
        loads[sender, receiver] = count, 1, route.rate, route.latency
        for card in (route.out_card, route.in_card):
            if card != NO_CARD:
                total, flows, *_ = loads.get((-1, card), (0, 0, 0.0, 0.0))
                loads[-1, card] = total + count, flows + 1, network.card_bandwidth(card), 0.0
    return loads


def busiest(
    first: dict[tuple[int, int], Load],
    num_first: int,
    last: dict[tuple[int, int], Load],
    num_last: int,
    size: MessageBytes,
) -> Floats:
    """Seconds of the busiest flow or card when both sizes of micro-batches are through."""
    nothing = (0, 0, 1.0, 0.0)
    # Many flows carry the same load; each different one is looked at once.
    pairs = {
        (first.get(key, nothing), last.get(key, nothing)) for key in first.keys() | last.keys()
    }
    work = np.zeros_like(size.per_row)
    for one, other in sorted(pairs):
        seconds = num_first * _seconds(one, size)
        if num_last:
            seconds = seconds + num_last * _seconds(other, size)
        work = np.maximum(work, seconds)
    return work


def arrival(loads: dict[tuple[int, int], Load], size: MessageBytes) -> Floats:
    """Seconds until the first receiver has all of its rows, of one micro-batch's loads."""
    waits: dict[int, Floats] = {}
    for (sender, receiver), load in loads.items():
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
