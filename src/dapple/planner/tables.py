"""Costs of every possible stage as arrays, so that a search can look at thousands of plans at once.

A stage over the layers i..j takes prefix[j] - prefix[i] seconds, for each of a few prefix sums; a
transfer over the cut before layer j takes the j-th entry of an array. The simulator, not this
module, decides what a plan costs in the end. Two kinds of times are kept apart: `least` ones, below
which no run can stay, for lower bounds, and `likely` ones for ranking.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dapple.costs import Network, Ring, split_rows, statistics_seconds
from dapple.planner.exposed import exposed_alone, exposed_seconds
from dapple.planner.layers import LayerTables, prefix
from dapple.planner.splits import RowSplits, Split
from dapple.planner.symmetry import Symmetry
from dapple.planner.traffic import (
    Devices,
    Floats,
    Load,
    arrival,
    busiest,
    link_loads,
    traffic,
    transfer_seconds,
)

Ints = NDArray[np.int64]
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
        layers: costs of the N layers.
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
        layers: LayerTables,
        network: Network,
        symmetry: Symmetry,
        global_batch_size: int,
        micro_batches: int,
        proportional: bool = False,
    ) -> None:
        self.layers = layers
        self.profile = layers.profile
        self.network = network
        self.symmetry = symmetry
        self.micro_batches = micro_batches
        sizes = split_rows(global_batch_size, micro_batches)
        self.first_rows, self.last_rows = sizes[0], sizes[-1]
        self.num_first = sizes.count(sizes[0])
        self._kinds = network.cluster.kind_of_device()
        self.splits = RowSplits(self._kinds, self.first_rows, self.last_rows, proportional)
        self.stage_times: dict[tuple[Devices, int, int, bool], StageTimes] = {}
        self._seconds: dict[Shares, dict[str, Floats]] = {}
        self._rooms: dict[tuple[Devices, int, int, float], float] = {}
        self._stages: dict[Hashable, StageTable] = {}
        self._links: dict[Hashable, LinkTable] = {}
        self._link_of_loads: dict[tuple[Load, ...], LinkTable] = {}
        self._least_links: dict[Hashable, LeastLink] = {}
        self._exposed: dict[Devices, Floats] = {}

    def room(self, devices: Devices, start: int, stop: int, optimizer_state_factor: float) -> float:
        """About how many micro-batches of a stage's layers fit in flight; below 1, it does not fit."""
        key = devices, start, stop, optimizer_state_factor
        found = self._rooms.get(key)
        if found is None:
            found = math.inf
            for rows, memory in self.splits.loads(devices):
                fixed, each = self.layers.stage_bytes(start, stop, rows, optimizer_state_factor)
                found = min(found, (memory - float(fixed)) / max(float(each), 1.0))
            self._rooms[key] = found
        return found

    def stage(self, devices: Devices) -> StageTable:
        """The table of a stage on these devices."""
        found = self._stages.get(devices)
        if found is None:
            key = self.symmetry.cost_key(devices)
            found = self._stages.get(key)
            if found is None:
                found = self._stages[key] = self._make_stage(devices)
            self._stages[devices] = found
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
                found = LinkTable(*transfer_seconds(loads, self.layers.crossing_bytes))
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
        own = self.layers.own_parameter_bytes(start, stop)
        fixed = ring[0] * self.layers.fewest_buckets(own)
        whole = fixed + own * ring[1] - (table.most_backward[stop] - table.most_backward[start])
        whole = np.where(own > 0, whole, 0.0)
        if self.profile.num_layers > _FEW_LAYERS:
            ends = [
                exposed_alone(
                    self.layers.untied_prefix[a : b + 1], table.most_backward[a : b + 1], *ring
                )
                for a, b in zip(start.tolist(), stop.tolist(), strict=True)
            ]
            return np.maximum(whole, ends)
        if devices not in self._exposed:
            self._exposed[devices] = exposed_seconds(
                self.layers.untied_prefix, table.most_backward, *ring
            )
        return np.maximum(whole, self._exposed[devices][start, stop])

    def _make_stage(self, devices: Devices) -> StageTable:
        split = self.splits.of(devices)
        ring = self.network.ring(split.devices)
        between = [(r.latency, ring.between_factor / r.rate) for r in ring.between]
        speeds = [self._kinds[device].speed for device in split.devices]
        shares = tuple(sorted(set(zip(speeds, split.first, split.last, strict=True))))
        return StageTable(
            **self._with_statistics(split, ring, self._stage_seconds(shares)),
            optimizer=self.layers.optimizer_prefix / min(speeds),
            least_optimizer=self.layers.optimizer_prefix / max(speeds),
            reduce_fixed=ring.inside_latency + max((a for a, _ in between), default=0.0),
            reduce_per_byte=ring.inside_seconds_per_byte
            + max((b for _, b in between), default=0.0),
        )

    def _with_statistics(
        self, split: Split, ring: Ring, seconds: dict[str, Floats]
    ) -> dict[str, Floats]:
        """With what batch norms take to add up over the replicas; least_forward and -backward without."""
        if not self.layers.have_statistics:
            return seconds
        layers, replicas = self.profile.layers, len(split.devices)
        forward, backward = map(prefix, statistics_seconds(layers, ring, replicas))
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
            forward, backward = (seconds / speed for seconds in self.layers.layer_seconds(first))
            forward_last, backward_last = (s / speed for s in self.layers.layer_seconds(last))
            work = self.num_first * (forward + backward) + num_last * (forward_last + backward_last)
            likely = [
                np.maximum(a, b) for a, b in zip(likely, (forward, backward, work), strict=True)
            ]
            least[0] = np.minimum(least[0], np.diff(forward)) if first else least[0]
            least[1] = np.minimum(least[1], np.diff(backward_last)) if last else least[1]
            most = np.maximum(most, np.diff(backward_last))
        names = ("least_forward", "least_backward", "likely_forward", "likely_backward", "work")
        found = dict(zip(names, [*map(prefix, least), *likely], strict=True))
        found["most_backward"] = prefix(most)
        self._seconds[shares] = found
        return found

    def _make_least_link(self, senders: Devices, receivers: Devices) -> LeastLink:
        certain, num_last = self.layers.certain_bytes, self.micro_batches - self.num_first
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
