"""Device sets that cost the same: equal machines and devices are interchangeable."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable

import numpy as np

from dapple.cluster import Cluster
from dapple.costs import Network
from dapple.planner.traffic import Devices, Places


class Symmetry:
    """Keys that are equal for device sets of equal cost.

    Args:
        cluster: the devices.
        network: its routes and rings.

    Attributes:
        places: machine of each device, and group of each machine.
        period: devices after which numbers repeat themselves: those of a machine, where all
            machines are equal; 0 where they are not.
        memories: the different sizes of the devices' memory, bytes.
    """

    def __init__(self, cluster: Cluster, network: Network) -> None:
        self._network = network
        self._kinds = cluster.kind_of_device()
        machine_of = np.array(cluster.machine_of_device())
        groups = cluster.machine_groups()
        # Groups with the same content count as one.
        self._group = [groups.index(group) for group in groups]
        self.places = Places(machine_of, np.array(self._group))
        sizes = cluster.machine_sizes()
        self.period = sizes[0] if len(set(self._group)) == 1 else 0
        self.memories = frozenset(kind.memory for kind in self._kinds)
        self._one_kind = len(set(self._kinds)) == 1
        self._rings: dict[Hashable, tuple[float, float]] = {}
        self._cost_keys: dict[Devices, Hashable] = {}
        self._link_keys: dict[tuple[Devices, Devices], Hashable] = {}

    def least_memory(self, devices: Devices) -> int:
        """Bytes of the device with the least memory."""
        if self._one_kind:
            return self._kinds[0].memory
        return min(self._kinds[device].memory for device in devices)

    def stage_key(self, devices: Devices) -> Hashable:
        """Equal where the same layers take the same time and the same share of the memory."""
        if self._one_kind:
            return len(devices)
        return tuple((self._kinds[d].speed, self._kinds[d].memory) for d in devices)

    def cost_key(self, devices: Devices) -> Hashable:
        """Equal where also their AllReduces take the same time."""
        found = self._cost_keys.get(devices)
        if found is None:
            found = self._cost_keys[devices] = (self.stage_key(devices), self.reduce_cost(devices))
        return found

    def link_key(self, senders: Devices, receivers: Devices) -> Hashable:
        """Equal where transfers between the two stages take the same routes."""
        found = self._link_keys.get((senders, receivers))
        if found is None:
            found = self._link_keys[senders, receivers] = self._find_link_key(senders, receivers)
        return found

    def _find_link_key(self, senders: Devices, receivers: Devices) -> Hashable:
        machines, lengths = self._runs(senders + receivers)
        names: dict[int, int] = {}
        pattern = tuple(names.setdefault(machine, len(names)) for machine in machines)
        groups = tuple(self._group[machine] for machine in names)
        return len(senders), tuple(lengths), pattern, groups

    def _runs(self, devices: Devices) -> tuple[list[int], list[int]]:
        """Machines in the order of the devices, and how many neighbouring devices are on each."""
        machines = self.places.machine_of[np.array(devices)]
        new = np.flatnonzero(machines[1:] != machines[:-1]) + 1
        starts = [0, *new.tolist()]
        lengths = [b - a for a, b in itertools.pairwise([*starts, len(devices)])]
        return machines[starts].tolist(), lengths

    def reduce_cost(self, devices: Devices) -> tuple[float, float]:
        """AllReduce over the devices: seconds whatever the bytes, and seconds for each byte."""
        counts: Counter[int] = Counter()
        for machine, length in zip(*self._runs(devices), strict=True):
            counts[machine] += length
        key = tuple(sorted((self._group[machine], count) for machine, count in counts.items()))
        found = self._rings.get(key)
        if found is None:
            ring = self._network.ring(devices)
            fixed = ring.inside_latency + max((r.latency for r in ring.between), default=0.0)
            rate = max((ring.between_factor / r.rate for r in ring.between), default=0.0)
            found = self._rings[key] = fixed, ring.inside_seconds_per_byte + rate
        return found
