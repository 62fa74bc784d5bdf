"""Whether a step of T seconds can be met at all, on large clusters: the quickest way by devices.

State (layer j, devices d): the least time that a micro-batch takes through the layers before j, if
they run on d devices. States from which the devices that are left cannot suffice, see `fluid`, are
dropped; near the answer few remain.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dapple.planner.fluid import Fluid
from dapple.planner.layers import LayerTables, prefix
from dapple.planner.mixed import units_of
from dapple.planner.problem import Problem
from dapple.planner.relaxed import (
    caps_in_flight,
    held_bytes,
    least_in_flight,
    least_rings,
    memory_for,
    to_the_end,
)
from dapple.planner.shares import Shares
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats

_SLACK = 1e-9
_ROUNDING = 64
"""Bytes by which the sums here may be above those of a stage that just fits."""
_CHUNK = 100_000
"""Stages that are looked at together."""
_DELAYS = 64
"""Steps in which the delay of a micro-batch counts for the devices that are still needed."""


@dataclass(frozen=True)
class Demand:
    """Costs that no plan undercuts. R shares of first replicas, N layers.

    Attributes:
        found: the shares.
        tables: for parameters and their AllReduce.
        fluid: what is needed for the layers behind a cut.
        both, forward, work: shape (R, N + 1), prefix sums of F + B, F, and the whole step.
        trip: shape (R, N + 1), prefix sums of F + B of the smallest micro-batch.
        back: shape (N + 1,), the quickest way from a cut to the end and back.
        last_backward: shape (R, N + 1), prefix sums of what the last B takes.
        enter_both, enter_forward: shape (N + 1,), the quickest message over a cut, F + B and F.
        fixed, saved: shape (R, N + 1), prefix sums of bytes that a stage holds, and for each
            micro-batch in flight.
        memory: bytes of the largest device.
        in_flight: micro-batches that a stage must hold.
        capped: whether memory limits how many it holds.
        ring_fixed, ring_rate: shape (R,), AllReduce seconds, and seconds per byte.
        speed: of the fastest device.
        updates: shape (R, 1, 1), the most replicas that share out an update.
        devices: units of the cluster, which are devices where all are equally fast.
    """

    found: Shares
    tables: LayerTables
    fluid: Fluid
    both: Floats
    forward: Floats
    work: Floats
    trip: Floats
    back: Floats
    last_backward: Floats
    enter_both: Floats
    enter_forward: Floats
    fixed: Floats
    saved: Floats
    memory: float
    in_flight: int
    capped: bool
    ring_fixed: Floats
    ring_rate: Floats
    speed: float
    updates: Floats
    devices: int

    @classmethod
    def of(cls, problem: Problem, found: Shares) -> Demand:
        """The costs for all M of a range of `row_ranges`."""
        tables = problem.layer_tables
        speed = max(problem.speeds)
        rings = [least_rings(problem, int(width)) for width in found.widths]
        most = found.most_widths
        fixed, saved = held_bytes(problem, found)
        enter_both, enter_forward = _entering(problem, found)
        quickest = found.trip.min(axis=0) / speed
        return cls(
            found=found,
            tables=tables,
            fluid=Fluid.of(found, speed, bool(tables.linked[1:-1].all())),
            both=prefix((found.forward + found.backward) / speed),
            forward=prefix(found.forward / speed),
            work=prefix(found.work / speed),
            trip=prefix(found.trip / speed),
            back=to_the_end(quickest, tables.linked),
            last_backward=prefix(found.last_backward / speed),
            enter_both=enter_both,
            enter_forward=enter_forward,
            fixed=fixed,
            saved=saved,
            memory=memory_for(problem) if problem.memory_is_known else float(2**62),
            in_flight=least_in_flight(problem, found),
            capped=caps_in_flight(problem),
            ring_fixed=np.array([min(fixed for fixed, _ in options) for options in rings]),
            ring_rate=np.array([min(rate for _, rate in options) for options in rings]),
            speed=speed,
            updates=np.where(problem.shard, most, 1.0)[:, None, None],
            devices=units_of(problem).total,
        )

    def meets(self, target: float) -> bool:
        """Whether the devices suffice for a step of `target` seconds."""
        limit = target * (1 + _SLACK)
        layers = self.both.shape[1] - 1
        needed = self.fluid.needed(limit, np.linspace(0.0, limit, _DELAYS, endpoint=False))
        if needed[0, 0] > self.devices:
            return False
        ways, ways_forward = np.full((2, layers + 1, self.devices + 1), np.inf)
        ways[0, 0] = ways_forward[0, 0] = 0.0
        starts = _chunks(self._least_work, limit, len(self.found.units))
        for first, stop in starts:
            if not np.isfinite(ways[first:stop]).any():
                continue
            stages = self._stages(first, stop, limit, needed[0])
            for start in range(first, stop):
                before = self._useful(start, ways[start], ways_forward[start], needed, limit)
                if len(before[0]):
                    self._add(stages, start, before, needed[0], (ways, ways_forward))
        return bool(np.isfinite(ways[layers]).any())

    def _useful(
        self, start: int, both: Floats, forward: Floats, needed: Floats, limit: float
    ) -> tuple[Ints, Floats, Floats]:
        """Devices before a stage, and the least A_0 + F + B and F on the way to it.

        More devices than in another state are of use only where something is less.
        """
        least, least_f = np.minimum.accumulate(both), np.minimum.accumulate(forward)
        fewer = least < np.concatenate([[np.inf], least[:-1]])
        fewer |= least_f < np.concatenate([[np.inf], least_f[:-1]])
        found = np.flatnonzero(fewer)
        if start and not self.tables.linked[start]:
            found = found[:1]  # The stages do not wait for each other.
            return found, np.zeros(len(found)), np.zeros(len(found))
        late = (least[found] - self.fluid.quickest[start]) * self.fluid.linked
        step = np.clip(late / limit * len(needed), 0, len(needed) - 1) if limit > 0 else late * 0
        found = found[found + needed[step.astype(np.int64), start] <= self.devices]
        enter = (self.enter_both[start], self.enter_forward[start]) if start else (0.0, 0.0)
        return found, least[found] + enter[0], least_f[found] + enter[1]

    def _add(
        self,
        stages: _Stages,
        start: int,
        before: tuple[Ints, Floats, Floats],
        needed: Floats,
        ways: tuple[Floats, Floats],
    ) -> None:
        """Every stage that begins at `start`, behind every useful state.

        Args:
            stages: those that begin near `start`.
            start: first layer.
            before: as `_useful` returns it.
            needed: shape (N + 1,), devices for the layers behind each cut.
            ways: shape (N + 1, G + 1) each, the least A_0 + F + B and F, to be lowered.
        """
        devices, way, way_forward = before
        own = slice(*np.searchsorted(stages.start, [start, start + 1]))
        stop = stages.stop[own]
        used = devices + stages.units[own, None]
        allowed = used + needed[stop][:, None] <= self.devices
        allowed &= way <= stages.slack[own, None]
        allowed &= way_forward <= stages.synced[own, None]
        pair, state = np.nonzero(allowed)
        index = stop[pair] * (self.devices + 1) + used[pair, state]
        np.minimum.at(ways[0].reshape(-1), index, way[state] + stages.both[own][pair])
        np.minimum.at(ways[1].reshape(-1), index, way_forward[state] + stages.forward[own][pair])

    def _stages(self, first: int, last: int, limit: float, needed: Floats) -> _Stages:
        """All stages that begin at layers `first` up to `last`, and can be part of a plan."""
        starts = np.arange(first, last)
        most = self._least_work[starts] + limit - self.fluid.quickest[starts]
        reach = np.searchsorted(self._least_work, most, side="right")
        longest = int((reach - starts).max()) - 1
        stops = starts[:, None] + np.arange(1, max(longest, 1) + 1)
        inside = stops < len(self._least_work)
        stops = np.minimum(stops, len(self._least_work) - 1)
        own, both, forward, trip, fixed, saved = (
            sums[:, stops] - sums[:, starts, None]
            for sums in (self.work, self.both, self.forward, self.trip, self.fixed, self.saved)
        )
        room = np.floor((self.memory - fixed + _ROUNDING) / np.maximum(saved, 1e-6))
        busy = own
        if self.capped:
            rounds = np.ceil(self.found.low / np.clip(room, 1, self.found.low))
            busy = np.maximum(own, rounds * (trip + self.back[stops]))
        after = self._after(starts, stops)
        slack, synced = limit - busy, limit - busy - after
        if first == 0:  # A_0 counts with every way.
            both[:, 0] += after[:, 0]
            slack[:, 0] = synced[:, 0]
        fits = inside & (room >= self.in_flight) & (synced >= 0)
        fits &= slack >= self.fluid.quickest[starts, None]
        fits &= self.found.units[:, None, None] + needed[stops] <= self.devices
        start, stop, share = np.nonzero(fits.transpose(1, 2, 0))
        found = share, start, stop
        return _Stages(
            start=starts[start],
            stop=stops[start, stop],
            units=self.found.units[share],
            both=both[found],
            forward=forward[found],
            slack=slack[found],
            synced=synced[found],
        )

    @cached_property
    def _least_work(self) -> Floats:
        """Prefix sums of every layer's least work, rounded down, to tell how far a stage gets."""
        return prefix(np.diff(self.work).min(axis=0) * (1 - _SLACK))

    def _after(self, starts: Ints, stops: Ints) -> Floats:
        """AllReduce behind the last backward, and optimizer, of stages.

        Args:
            starts: shape (C,), first layers.
            stops: shape (C, L), last layers + 1, of ever longer stages.

        Returns:
            Shape (R, C, L). See `exposed_seconds`, of which this is a part for all shares.
        """
        begin, tables = starts[:, None], self.tables
        own = np.maximum(tables.own_parameter_bytes(begin, stops), 0.0)
        fixed, rate = self.ring_fixed[:, None, None], self.ring_rate[:, None, None]
        last = self.last_backward[:, stops] - self.last_backward[:, begin]
        before = self.last_backward[:, stops - 1] - self.last_backward[:, begin]
        several = tables.fewest_buckets(own) * fixed
        whole = np.where(own > 0, several + rate * own - last, 0.0)
        untied = tables.untied_prefix[stops] - tables.untied_prefix[begin]
        late = np.where(untied > 0, rate * untied - before, -np.inf)
        exposed = np.maximum(whole, fixed + np.maximum.accumulate(late, axis=2))
        update = np.maximum(tables.optimizer_prefix[stops] - tables.optimizer_prefix[begin], 0.0)
        after: Floats = np.maximum(exposed, 0.0) + update / self.speed / self.updates
        return after


@dataclass(frozen=True)
class _Stages:
    """Stages in the order of their first layers; shape (P,) each.

    Attributes:
        start, stop: layers.
        units: what they take of the cluster's.
        both, forward: seconds of a micro-batch's F + B, with A_0 where it is the first, and of F.
        slack: the most seconds that a micro-batch's A_0 + F + B before the stage may take.
        synced: the most that its F may.
    """

    start: Ints
    stop: Ints
    units: Ints
    both: Floats
    forward: Floats
    slack: Floats
    synced: Floats


def _chunks(least_work: Floats, limit: float, shares: int) -> list[tuple[int, int]]:
    """Ranges of first layers with about `_CHUNK` stages in all."""
    layers = len(least_work) - 1
    reach = np.searchsorted(least_work, least_work[:-1] + limit, side="right")
    stages = np.cumsum((reach - np.arange(layers)) * shares) // _CHUNK
    ends = [*np.flatnonzero(np.diff(stages)) + 1, layers]
    return list(itertools.pairwise([0, *map(int, ends)]))


def _entering(problem: Problem, found: Shares) -> tuple[Floats, Floats]:
    """Seconds of the least messages over each cut: forward and backward, and forward."""
    latency, rate = problem.model.network.best_route
    certain = problem.layer_tables.certain_bytes
    seconds = []
    for size, rows in (
        (certain.forward, found.first_rows),
        (certain.backward, found.last_rows),
    ):
        sent = rows.min() * size.per_row + size.fixed
        seconds.append(np.where(sent > 0, latency + sent / rate, 0.0))
    return seconds[0] + seconds[1], seconds[0]
