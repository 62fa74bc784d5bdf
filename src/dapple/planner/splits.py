"""Who of a stage's replicas works on how many rows: evenly, or in proportion to their speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dapple.cluster import DeviceKind
from dapple.costs import proportional_rows, split_rows
from dapple.planner.traffic import Devices, Rows


class Split(NamedTuple):
    """The replicas of a stage, with their rows of the first and of the last micro-batch.

    Attributes:
        devices: the replicas; with proportional rows only those that have some.
        first, last: rows of each.
        shares: of the rows, as a plan has them; None: even.
    """

    devices: Devices
    first: Rows
    last: Rows
    shares: tuple[float, ...] | None


class RowSplits:
    """How the rows of two sizes of micro-batches are split over any devices.

    Args:
        kinds: of every device of the cluster.
        first_rows, last_rows: of the largest and of the smallest micro-batch.
        proportional: replicas of different speed have rows in proportion to it.
    """

    def __init__(
        self, kinds: Sequence[DeviceKind], first_rows: int, last_rows: int, proportional: bool
    ) -> None:
        self._kinds = kinds
        self._sizes = first_rows, last_rows
        self._proportional = proportional
        self._found: dict[Devices, Split] = {}
        self._even: dict[int, tuple[Rows, Rows]] = {}
        self._loads: dict[Devices, list[tuple[int, int]]] = {}

    def of(self, devices: Devices) -> Split:
        """The split of a stage on these devices."""
        found = self._found.get(devices)
        if found is None:
            found = self._found[devices] = self._make(devices)
        return found

    def loads(self, devices: Devices) -> list[tuple[int, int]]:
        """What must fit: (rows, bytes of memory), the most rows for each size of memory.

        Where rows are even, the device with the least memory is taken to have the most of them.
        """
        found = self._loads.get(devices)
        if found is None:
            found = self._loads[devices] = self._find_loads(self.of(devices))
        return found

    def _find_loads(self, split: Split) -> list[tuple[int, int]]:
        if split.shares is None:
            return [(split.first[0], min(self._kinds[device].memory for device in split.devices))]
        most: dict[int, int] = {}
        for device, rows in zip(split.devices, split.first, strict=True):
            memory = self._kinds[device].memory
            most[memory] = max(rows, most.get(memory, 0))
        return [(rows, memory) for memory, rows in sorted(most.items())]

    def _make(self, devices: Devices) -> Split:
        if self._proportional and self._differ(devices):
            speeds = [self._kinds[device].speed for device in devices]
            rows = proportional_rows(self._sizes[0], speeds)
            devices = tuple(d for d, n in zip(devices, rows, strict=True) if n)
            if self._differ(devices):
                first = tuple(n for n in rows if n)
                last = split_rows(self._sizes[1], len(devices), first)
                return Split(devices, first, last, tuple(map(float, first)))
        return Split(devices, *self._even_rows(len(devices)), None)

    def _even_rows(self, replicas: int) -> tuple[Rows, Rows]:
        found = self._even.get(replicas)
        if found is None:
            first, last = (split_rows(size, replicas) for size in self._sizes)
            found = self._even[replicas] = first, last
        return found

    def _differ(self, devices: Devices) -> bool:
        return len({self._kinds[device].speed for device in devices}) > 1
