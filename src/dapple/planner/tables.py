"""Costs of every possible stage as arrays, so that a search can look at thousands of plans at once.

A stage over the layers i..j takes prefix[j] - prefix[i] seconds, for each of a few prefix sums; a
transfer over the cut before layer j takes the j-th entry of an array. The simulator, not this
module, decides what a plan costs in the end. Two kinds of times are kept apart: `least` ones, below
which no run can stay, for lower bounds, and `likely` ones for ranking.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dapple.costs import Network, Ring, split_rows, statistics_seconds
from dapple.costs.model import BUCKET_BYTES, MOST_BUCKETS
from dapple.planner.exposed import exposed_alone, exposed_seconds
from dapple.planner.splits import RowSplits, Split
from dapple.planner.symmetry import Symmetry
from dapple.planner.traffic import (
    CutBytes,
    Devices,
    Floats,
    Load,
    arrival,
    busiest,
    certain_bytes,
    crossing_bytes,
    link_loads,
    traffic,
    transfer_seconds,
)
from dapple.records import ModelProfile

Ints = NDArray[np.int64]
Index = int | Ints
Shares = tuple[tuple[float, int, int], ...]
StageTimes = tuple[float, float, float, float]
"""Seconds of a stage: forward, backward, whole work, and what comes after."""

_FEW_LAYERS = 64
"""Up to so many layers, what AllReduces expose is worked out for all pairs of cuts at once."""


@dataclass(frozen=True)
class StageTable:
    """One device set as a stage, over all layer ranges. Prefix sums of shape (N + 1,), seconds.

    Attributes:
        least_forward: of the first (largest) micro-batch, on the quickest replica that has rows.
        least_backward: of the last (smallest) micro-batch, likewise.
        most_backward: of the last micro-batch, no replica takes longer for any layer.
        likely_forward, likely_backward: of the first micro-batch on the slowest replica.
        work: forwards and backwards of all micro-batches on the busiest replica.
        optimizer: update of the parameters on the slowest device.
        least_optimizer: the same on the fastest one.
        reduce_fixed: AllReduce seconds that do not depend on the bytes.
        reduce_per_byte: AllReduce seconds for each byte of parameters.
    """

    least_forward: Floats
    least_backward: Floats
    most_backward: Floats
    likely_forward: Floats
    likely_backward: Floats
    work: Floats
    optimizer: Floats
    least_optimizer: Floats
    reduce_fixed: float
    reduce_per_byte: float


@dataclass(frozen=True)
class LinkTable:
    """The transfer between two adjacent stages, by cut; shape (N + 1,), seconds.

    Attributes:
        forward, backward: of the first micro-batch, everything that crosses the cut, until the
            last flow is through.
    """

    forward: Floats
    backward: Floats


@dataclass(frozen=True)
class LeastLink:
    """What no run of a transfer can stay below, by cut; shape (N + 1,), seconds.

    Attributes:
        forward: activations of the first micro-batch that certainly travel between the two
            stages, to the replica that has its rows first.
        backward: gradients of the last micro-batch, likewise.
        work: the whole step's on the busiest flow or network card.
    """

    forward: Floats
    backward: Floats
    work: Floats


class CostTables:
    """Stage and transfer times for one profile, cluster and number of micro-batches.

    Args:
        profile: N layers.
        network: routes and rings of the cluster.
        symmetry: which device sets of the cluster cost the same.
        global_batch_size: rows of a step.
        micro_batches: M <= global_batch_size.
        proportional: replicas of different speed have rows in proportion to it.

    Attributes:
        splits: the rows of a stage's replicas.
        stage_times: what `dapple.planner.estimate` found, by devices, first layer, last + 1, and shard.
    """

    def __init__(
        self,
        profile: ModelProfile,
        network: Network,
        symmetry: Symmetry,
        global_batch_size: int,
        micro_batches: int,
        proportional: bool = False,
    ) -> None:
        self.profile = profile
        self.network = network
        self.symmetry = symmetry
        self.micro_batches = micro_batches
        sizes = split_rows(global_batch_size, micro_batches)
        self.first_rows, self.last_rows = sizes[0], sizes[-1]
        self.num_first = sizes.count(sizes[0])
        self._kinds = network.cluster.kind_of_device()
        self.splits = RowSplits(self._kinds, self.first_rows, self.last_rows, proportional)
        self.stage_times: dict[tuple[Devices, int, int, bool], StageTimes] = {}
        self._layer_seconds: dict[float, tuple[Floats, Floats]] = {}
        self._saved: dict[int, Floats] = {}
        self._seconds: dict[Shares, dict[str, Floats]] = {}
        self._stages: dict[Devices, StageTable] = {}
        self._links: dict[Hashable, LinkTable] = {}
        self._link_of_loads: dict[tuple[Load, ...], LinkTable] = {}
        self._least_links: dict[Hashable, LeastLink] = {}
        self._exposed: dict[Devices, Floats] = {}

    @cached_property
    def certain_bytes(self) -> CutBytes:
        """What certainly travels between the two stages at each cut."""
        return certain_bytes(self.profile)

    @cached_property
    def crossing_bytes(self) -> CutBytes:
        """All that crosses each cut."""
        return crossing_bytes(self.profile)

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
    def untied_prefix(self) -> Floats:
        """Parameter bytes before each cut that only the layer's own stage adds up, wherever cut."""
        sizes = [layer.parameter_bytes for layer in self.profile.layers]
        for group in self.profile.tied:
            for layer in {member.layer for member in group.members}:
                sizes[layer] = max(0, sizes[layer] - group.parameter_bytes)
        return _prefix(sizes)

    @cached_property
    def optimizer_prefix(self) -> Floats:
        """Optimizer seconds of the layers before each cut."""
        return _prefix([layer.optimizer_seconds for layer in self.profile.layers])

    def layer_seconds(self, rows: float) -> tuple[Floats, Floats]:
        """Prefix sums of the layers' forward and backward seconds at so many rows."""
        found = self._layer_seconds.get(rows)
        if found is None:
            sizes = self.profile.batch_sizes
            forward, backward = (_prefix(all_at(sizes, v, rows)) for v in self._measured)
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
            found = _prefix(all_bytes_at(self.profile.batch_sizes, self._measured_bytes, rows))
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

    def stage(self, devices: Devices) -> StageTable:
        """The table of a stage on these devices."""
        found = self._stages.get(devices)
        if found is None:
            found = self._stages[devices] = self._make_stage(devices)
        return found

    def link(self, senders: Devices, receivers: Devices) -> LinkTable:
        """The table of the transfer between adjacent stages on these devices."""
        key = self.symmetry.link_key(senders, receivers)
        found = self._links.get(key)
        if found is None:
            one, other = self.splits.of(senders), self.splits.of(receivers)
            ends, rows = (one.devices, other.devices), (one.first, other.first)
            loads = link_loads(self.network, self.symmetry.places, ends, rows)
            found = self._link_of_loads.get(loads)
            if found is None:
                found = LinkTable(*transfer_seconds(loads, self.crossing_bytes))
                self._link_of_loads[loads] = found
            self._links[key] = found
        return found

    def least_link(self, senders: Devices, receivers: Devices) -> LeastLink:
        """The least seconds of the transfer between adjacent stages on these devices."""
        key = self.symmetry.link_key(senders, receivers)
        found = self._least_links.get(key)
        if found is None:
            found = self._least_links[key] = self._make_least_link(senders, receivers)
        return found

    def least_exposed(self, devices: Devices, start: Ints, stop: Ints) -> Floats:
        """Least seconds of AllReduce after the last backward of stages start..stop, shape (P,)."""
        table = self.stage(devices)
        ring = table.reduce_fixed, table.reduce_per_byte
        if not any(ring):
            return np.zeros(len(start))
        own = self.own_parameter_bytes(start, stop)
        fixed = ring[0] * self.fewest_buckets(own)
        whole = fixed + own * ring[1] - (table.most_backward[stop] - table.most_backward[start])
        whole = np.where(own > 0, whole, 0.0)
        if self.profile.num_layers > _FEW_LAYERS:
            ends = [
                exposed_alone(self.untied_prefix[a : b + 1], table.most_backward[a : b + 1], *ring)
                for a, b in zip(start.tolist(), stop.tolist(), strict=True)
            ]
            return np.maximum(whole, ends)
        if devices not in self._exposed:
            self._exposed[devices] = exposed_seconds(self.untied_prefix, table.most_backward, *ring)
        return np.maximum(whole, self._exposed[devices][start, stop])

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

    def _make_stage(self, devices: Devices) -> StageTable:
        split = self.splits.of(devices)
        ring = self.network.ring(split.devices)
        between = [(r.latency, ring.between_factor / r.rate) for r in ring.between]
        speeds = [self._kinds[device].speed for device in split.devices]
        shares = tuple(sorted(set(zip(speeds, split.first, split.last, strict=True))))
        return StageTable(
            **self._with_statistics(split, ring, self._stage_seconds(shares)),
            optimizer=self.optimizer_prefix / min(speeds),
            least_optimizer=self.optimizer_prefix / max(speeds),
            reduce_fixed=ring.inside_latency + max((a for a, _ in between), default=0.0),
            reduce_per_byte=ring.inside_seconds_per_byte
            + max((b for _, b in between), default=0.0),
        )

    def _with_statistics(
        self, split: Split, ring: Ring, seconds: dict[str, Floats]
    ) -> dict[str, Floats]:
        """With what batch norms take to add up over the replicas; least_forward and -backward without."""
        layers = self.profile.layers
        if not any(layer.statistics_bytes for layer in layers):
            return seconds
        forward, backward = map(_prefix, statistics_seconds(layers, ring, len(split.devices)))
        counts = [self.num_first, self.micro_batches - self.num_first]
        # Micro-batches of which every replica has rows.
        busy = sum(
            n for n, rows in zip(counts, (split.first, split.last), strict=True) if min(rows)
        )
        return seconds | {
            "most_backward": seconds["most_backward"] + backward,
            "likely_forward": seconds["likely_forward"] + forward,
            "likely_backward": seconds["likely_backward"] + backward,
            "work": seconds["work"] + busy * (forward + backward),
        }

    def _stage_seconds(self, shares: Shares) -> dict[str, Floats]:
        found = self._seconds.get(shares)
        if found is not None:
            return found
        num_last = self.micro_batches - self.num_first
        shape = self.profile.num_layers + 1
        # Layer by layer: replicas of different speed and rows need not agree on what takes longer.
        least = [np.full(self.profile.num_layers, np.inf) for _ in range(2)]
        likely = [np.zeros(shape) for _ in range(3)]
        most = np.zeros(self.profile.num_layers)
        for speed, first, last in shares:
            forward, backward = (seconds / speed for seconds in self.layer_seconds(first))
            forward_last, backward_last = (s / speed for s in self.layer_seconds(last))
            work = self.num_first * (forward + backward) + num_last * (forward_last + backward_last)
            likely = [
                np.maximum(a, b) for a, b in zip(likely, (forward, backward, work), strict=True)
            ]
            least[0] = np.minimum(least[0], np.diff(forward)) if first else least[0]
            least[1] = np.minimum(least[1], np.diff(backward_last)) if last else least[1]
            most = np.maximum(most, np.diff(backward_last))
        names = ("least_forward", "least_backward", "likely_forward", "likely_backward", "work")
        found = dict(zip(names, [*map(_prefix, least), *likely], strict=True))
        found["most_backward"] = _prefix(most)
        self._seconds[shares] = found
        return found

    def _make_least_link(self, senders: Devices, receivers: Devices) -> LeastLink:
        certain, num_last = self.certain_bytes, self.micro_batches - self.num_first
        one, other = self.splits.of(senders), self.splits.of(receivers)
        loads, last_loads = (
            traffic(self.network, one.devices, other.devices, rows)
            for rows in ((one.first, other.first), (one.last, other.last))
        )
        back, last_back = (
            traffic(self.network, other.devices, one.devices, rows)
            for rows in ((other.first, one.first), (other.last, one.last))
        )
        return LeastLink(
            forward=arrival(loads, certain.forward),
            backward=arrival(last_back, certain.backward),
            work=np.maximum(
                busiest(loads, self.num_first, last_loads, num_last, certain.forward),
                busiest(back, self.num_first, last_back, num_last, certain.backward),
            ),
        )


def shared_update(whole: ArrayLike, width: ArrayLike, ring: ArrayLike) -> Floats:
    """About the seconds of an update that replicas may share out, where that is shorter.

    Args:
        whole: seconds of the whole update.
        width: number of replicas.
        ring: seconds of an AllReduce of the parameters, of which half is the price; 0 for one
            replica.
    """
    shared: Floats = np.minimum(whole, np.divide(whole, width) + np.divide(ring, 2))
    return shared


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


def _prefix(values: Sequence[float] | Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
