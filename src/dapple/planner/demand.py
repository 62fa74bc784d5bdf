"""Whether a step of T seconds can be met at all, on large clusters: the fewest devices for it.

State (layer j, prefix p): the fewest devices on which the layers before j can run so that a
micro-batch's way through them, A_0 + sum (F + B), takes p seconds. Prefixes are rounded down to
multiples of T / levels, so nothing is lost but tightness, and the number of devices costs no time.
A state is passed on only where no shorter prefix does with as few devices; few are left then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dapple.planner.mixed import all_shares, units_of
from dapple.planner.problem import Problem
from dapple.planner.relaxed import least_rings
from dapple.planner.tables import CostTables, Ints
from dapple.planner.traffic import Floats

_SHARES = 64
_EFFORT = 500_000
_LEVELS = (256, 512)
_FEW_LEVELS = 64
_SLACK = 1e-9


@dataclass(frozen=True)
class Demand:
    """Costs that no plan undercuts. R shares of first replicas.

    Attributes:
        tables: for parameters and their AllReduce.
        widths: shape (R,), units of a stage: devices where all are equally fast.
        both, forward, work: shape (R, N + 1), prefix sums of F + B, F, and the whole step.
        last_backward: shape (R, N + 1), prefix sums of the most that the last B takes.
        held: shape (R, N + 1), prefix sums of bytes that a stage must hold.
        memory: bytes of the largest device.
        ring_fixed, ring_rate: shape (R,), AllReduce seconds, and seconds per byte.
        speed: of the fastest device.
        updates: shape (R, 1), the most replicas that share out an update.
        forward_share: F is at least this part of F + B in every layer.
        devices: units of the cluster.
        rough: fewer levels, for an answer that takes less time and is more often yes.
    """

    tables: CostTables
    widths: Floats
    both: Floats
    forward: Floats
    work: Floats
    last_backward: Floats
    held: Floats
    memory: int
    ring_fixed: Floats
    ring_rate: Floats
    speed: float
    updates: Floats
    forward_share: float
    devices: int
    rough: bool

    @classmethod
    def of(cls, problem: Problem, low: int, high: int, rough: bool = False) -> Demand:
        """The costs for all M from `low` to `high`."""
        found, tables = all_shares(problem, low, high, _SHARES), problem.tables(high)
        kinds = problem.cluster.kind_of_device()
        speed = max(kind.speed for kind in kinds)
        both = np.array([share.forward + share.backward for share in found]) / speed
        forward = np.array([share.forward for share in found]) / speed
        rings = [least_rings(problem, share.width) for share in found]
        most = [share.most_width for share in found]
        factors = [2 + problem.state_factor(width, problem.shard) for width in most]
        parts = np.diff(forward), np.diff(both)
        ratios = np.divide(*parts, out=np.ones_like(parts[0]), where=parts[1] > 0)
        return cls(
            tables=tables,
            widths=np.array([share.units for share in found], dtype=np.float64),
            both=both,
            forward=forward,
            work=np.array([share.work for share in found]) / speed,
            last_backward=np.array([share.last_backward for share in found]) / speed,
            held=np.array(
                [
                    factor * tables.parameter_prefix + tables.saved_prefix(share.held_rows)
                    for factor, share in zip(factors, found, strict=True)
                ]
            ),
            memory=max(k.memory for k in kinds) if problem.memory_is_known else 2**62,
            ring_fixed=np.array([min(fixed for fixed, _ in options) for options in rings]),
            ring_rate=np.array([min(rate for _, rate in options) for options in rings]),
            speed=speed,
            updates=np.array([most if problem.shard else np.ones(len(most))], dtype=np.float64).T,
            forward_share=float(ratios.min()),
            devices=units_of(problem).total,
            rough=rough,
        )

    def meets(self, target: float) -> bool:
        """Whether the devices suffice for a step of `target` seconds."""
        layers = self.both.shape[1] - 1
        levels = int(np.clip(_EFFORT / (layers * len(self.widths)), *_LEVELS))
        levels = _FEW_LEVELS if self.rough else levels
        limit = target * (1 + _SLACK)
        unit = limit / levels if limit > 0 else 1.0
        fewest = np.full((layers + 1, levels), np.inf)
        for start in range(layers):
            origins = np.zeros(1, dtype=np.int64)
            before = np.zeros(1)
            if start:
                origins = self._useful(fewest[start], bool(self.tables.linked[start]))
                before = fewest[start][origins]
                if not self.tables.linked[start]:
                    origins = np.zeros_like(origins)  # The stages do not wait for each other.
            if len(origins):
                self._add_stage(start, (origins, before), limit, unit, fewest)
        return bool(fewest[layers].min() <= self.devices)

    def _useful(self, fewest: Floats, linked: bool) -> Ints:
        """Levels with fewer devices than all below; only the last of them if none is waited for."""
        least = np.minimum.accumulate(np.where(fewest <= self.devices, fewest, np.inf))
        levels = np.flatnonzero(least < np.concatenate([[np.inf], least[:-1]]))
        return levels if linked else levels[-1:]

    def _add_stage(
        self, start: int, before: tuple[Ints, Floats], limit: float, unit: float, fewest: Floats
    ) -> None:
        """Lower the fewest devices behind every stage that begins at `start`.

        Args:
            start: first layer.
            before: levels of prefixes that end there, and their devices.
            limit, unit: seconds of the step, and of a level.
            fewest: the states.
        """
        reach = np.searchsorted(self._least_work, self._least_work[start] + limit, side="right")
        layers = slice(start + 1, int(reach) + 1)
        own = self.work[:, layers] - self.work[:, start, None]
        held = self.held[:, layers] - self.held[:, start, None]
        fits = (own <= limit) & (held <= self._room)
        after = self._after(start, own.shape[1])
        both = self.both[:, layers] - self.both[:, start, None]
        if start == 0:
            fits &= own + after <= limit
            both = both + after  # A_0 counts with every prefix.
            room = np.zeros_like(own)
        else:
            synced = limit - own - after
            fits &= synced >= 0
            share = self.forward_share
            room = np.minimum(limit - own, synced / share) if share > 0 else limit - own
        stops, chosen = np.nonzero(fits.T)
        if not len(stops):
            return
        shift = np.floor(both[chosen, stops] / unit * (1 - 1e-12)).astype(np.int64)
        origins, devices = before
        levels = origins + shift[:, None]
        allowed = levels < fewest.shape[1]
        allowed &= origins * unit <= room[chosen, stops][:, None]
        pair, origin = np.nonzero(allowed)
        sums = self.widths[chosen[pair]] + devices[origin]
        states = (stops[pair] + start + 1) * fewest.shape[1] + levels[pair, origin]
        np.minimum.at(fewest.reshape(-1), states, sums)

    @cached_property
    def _room(self) -> float:
        """Bytes for what a stage holds; a tied parameter may be counted twice in it."""
        twice = sum(g.parameter_bytes * (len(g.members) - 1) for g in self.tables.profile.tied)
        return float(self.memory) + 4.0 * twice

    @cached_property
    def _least_work(self) -> Floats:
        """Prefix sums of every layer's least work, rounded down, to tell how far a stage gets."""
        least = np.diff(self.work).min(axis=0) * (1 - _SLACK)
        return np.concatenate([[0.0], np.cumsum(least)])

    def _after(self, start: int, longest: int) -> Floats:
        """AllReduce behind the last backward, and optimizer, of stages of 1 to `longest` layers.

        Returns:
            Shape (R, longest). See `exposed_seconds`, of which this is one row for all shares.
        """
        stops = np.arange(start + 1, start + 1 + longest)
        own = np.maximum(self.tables.own_parameter_bytes(np.full_like(stops, start), stops), 0.0)
        fixed, rate = self.ring_fixed[:, None], self.ring_rate[:, None]
        last = self.last_backward[:, start : stops[-1] + 1] - self.last_backward[:, start, None]
        whole = np.where(own > 0, fixed + rate * own - last[:, 1:], 0.0)
        untied = self.tables.untied_prefix[stops] - self.tables.untied_prefix[start]
        late = np.where(untied > 0, rate * untied - last[:, :-1], -np.inf)
        exposed = np.maximum(whole, fixed + np.maximum.accumulate(late, axis=1))
        update = self.tables.optimizer_prefix[stops] - self.tables.optimizer_prefix[start]
        after: Floats = (
            np.maximum(exposed, 0.0) + np.maximum(update, 0.0) / self.speed / self.updates
        )
        return after
