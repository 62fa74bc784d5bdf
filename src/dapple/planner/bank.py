"""Stages and transfers by number, so that many layouts are looked at together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from dapple.planner.symmetry import Symmetry
from dapple.planner.tables import CostTables, Ints, shared_update
from dapple.planner.traffic import Devices, Floats


class Bank:
    """The tables of stages and transfers one under the other, for one number of micro-batches.

    Args:
        tables: where they come from.
        symmetry: which device sets cost the same; those share a number.
    """

    def __init__(self, tables: CostTables, symmetry: Symmetry) -> None:
        self._tables = tables
        self._symmetry = symmetry
        self._stage_of: dict[Hashable, int] = {}
        self._link_of: dict[Hashable, int] = {}
        layers = tables.profile.num_layers
        self._spans = _Spans(tables.layers.parameter_prefix)
        self._stages, self._late = _Rows(5, layers + 1), _Rows(self._spans.levels, layers)
        self._rings = _Rows(3)
        self._links = _Rows(2, layers + 1)
        # Per size of memory in a stage, the replica with most rows there.
        sizes = len(symmetry.memories)
        self._held, self._memory = _Rows(sizes, 3, layers + 1), _Rows(sizes)

    def stage(self, devices: Devices) -> int:
        """The number of the stages on these devices."""
        found = self._stage_of.get(devices)
        if found is None:
            key = self._symmetry.cost_key(devices)
            found = self._stage_of.get(key)
            if found is None:
                found = self._stage_of[key] = self._add_stage(devices)
            self._stage_of[devices] = found
        return found

    def link(self, senders: Devices, receivers: Devices) -> int:
        """The number of the transfers between two stages."""
        found = self._link_of.get((senders, receivers))
        if found is None:
            key = self._symmetry.link_key(senders, receivers)
            found = self._link_of.get(key)
            if found is None:
                link = self._tables.link(senders, receivers)
                found = self._link_of[key] = self._links.append([link.forward, link.backward])
            self._link_of[senders, receivers] = found
        return found

    def _add_stage(self, devices: Devices) -> int:
        tables = self._tables
        table = tables.stage(devices)
        fixed, per_byte = table.reduce_fixed, table.reduce_per_byte
        rings = self._spans.late(table.likely_backward, per_byte)
        base = per_byte * tables.layers.parameter_prefix - table.likely_backward - fixed
        if not (fixed or per_byte):
            rings = np.full_like(rings, -np.inf)
        self._late.append(rings)
        held = [(float(memory), self._bytes(rows)) for rows, memory in tables.splits.loads(devices)]
        held += [(np.inf, np.zeros_like(held[0][1]))] * (self._memory.array.shape[1] - len(held))
        self._memory.append(np.array([memory for memory, _ in held]))
        self._held.append(np.array([figures for _, figures in held]))
        self._rings.append([len(devices), fixed, per_byte])
        rows = table.likely_forward, table.likely_backward, table.work, table.optimizer, base
        return self._stages.append(rows)

    def _bytes(self, rows: int) -> Floats:
        """Of a replica with so many rows, by cut, shape (3, N + 1).

        Prefix sums of what a micro-batch in flight keeps; what comes in with each; buffers of what
        goes out.
        """
        layers = self._tables.layers
        there, back = layers.crossing_bytes.forward, layers.crossing_bytes.backward
        out = rows * back.per_row + back.fixed
        into = rows * there.per_row + there.fixed + rows * back.per_row + back.fixed
        return np.array([layers.saved_prefix(rows), into, 2 * out])

    def stage_seconds(self, stage: Ints, start: Ints, stop: Ints, shared: bool) -> list[Floats]:
        """Forward, backward, and whole work of stages from layer to layer, and what comes after.

        Args:
            stage: numbers; this and the others broadcast.
            start, stop: layers.
            shared: replicas may share out the update.
        """
        rows = self._stages.array
        sums = [rows[stage, n, stop] - rows[stage, n, start] for n in range(4)]
        if shared:
            width, fixed, per_byte = np.moveaxis(self._rings.array[stage], -1, 0)
            size = (
                self._tables.layers.parameter_prefix[stop]
                - self._tables.layers.parameter_prefix[start]
            )
            sums[3] = shared_update(sums[3], width, fixed + per_byte * size)
        longest = self._spans.most(self._late.array, stage, start, stop)
        sums[3] += np.maximum(longest - rows[stage, 4, start], 0.0)
        return sums

    def link_seconds(self, link: Ints, cut: Ints) -> tuple[Floats, Floats]:
        """Forward and backward of transfers over cuts."""
        rows = self._links.array
        return rows[link, 0, cut], rows[link, 1, cut]

    def room(self, stage: Ints, start: Ints, stop: Ints, state: float, shared: bool) -> Floats:
        """How many micro-batches fit in flight, as `CostTables.room` has it.

        Args:
            stage, start, stop: as above.
            state: bytes of optimizer state per byte of parameters.
            shared: replicas share it out.
        """
        parameters = self._tables.layers.parameter_prefix
        width = self._rings.array[stage, 0] if shared else 1
        held = (2 + state / width) * (parameters[stop] - parameters[start])
        rooms = []
        for number in range(self._memory.array.shape[1]):
            memory = self._memory.array[stage, number]
            saved, into, back = self._held.array[:, number].swapaxes(0, 1)
            entered = into[stage, start]
            each = saved[stage, stop] - saved[stage, start] + entered
            once = held + entered + back[stage, stop]
            rooms.append((memory - once) / np.maximum(each, 1.0))
        least: Floats = np.minimum.reduce(rooms)
        return least


class _Rows:
    """Arrays of one shape one under the other; what there is room for doubles when it is full."""

    def __init__(self, *shape: int) -> None:
        self.array = np.zeros((8, *shape))
        self._count = 0

    def append(self, values: Floats | Sequence[Floats | float]) -> int:
        """Add one, and return its number."""
        if self._count == len(self.array):
            self.array = np.concatenate([self.array, np.zeros_like(self.array)])
        self.array[self._count] = np.asarray(values)
        self._count += 1
        return self._count - 1


class _Spans:
    """What AllReduces leave over, of any range of layers: see `exposed_seconds`.

    The largest figure of a range is that of two ranges of 2^k layers that cover it.

    Args:
        size: shape (N + 1,), prefix sums of the layers' gradient bytes.
    """

    def __init__(self, size: Floats) -> None:
        self._size = size
        self._layers = len(size) - 1
        self.levels = self._layers.bit_length()
        # Layers below a stage's first one with parameters have nothing to add up.
        self._first = np.searchsorted(size, size, side="right") - 1
        self._level = np.array([max(n, 1).bit_length() - 1 for n in range(self._layers + 1)])

    def late(self, backward: Floats, per_byte: float) -> Floats:
        """Shape (levels, N): the largest figure of 2^k layers from each."""
        levels = [per_byte * self._size[1:] - backward[:-1]]
        for k in range(self.levels - 1):
            before = levels[-1]
            after = before.copy()
            np.maximum(before[: -(2**k)], before[2**k :], out=after[: -(2**k)])
            levels.append(after)
        return np.array(levels)

    def most(self, late: Floats, stage: Ints, start: Ints, stop: Ints) -> Floats:
        """The largest figure of stages from layer to layer; -inf without parameters."""
        first = self._first[start]
        length = stop - first
        level = self._level[np.maximum(length, 0)]
        begin = np.minimum(first, self._layers - 1)
        longest = np.maximum(late[stage, level, begin], late[stage, level, stop - (1 << level)])
        return np.where(length > 0, longest, -np.inf)
