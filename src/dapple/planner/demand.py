"""Whether a step of T seconds can be met at all, on large clusters: the fewest devices for it.

State (layer j, prefix p): the fewest devices on which the layers before j can run so that a
micro-batch's way through them, A_0 + sum (F + B), takes p seconds. Prefixes are rounded down to
multiples of T / levels, so nothing is lost but tightness, and the number of devices costs no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dapple.planner.problem import Problem
from dapple.planner.relaxed import least_rings
from dapple.planner.shares import shares
from dapple.planner.tables import CostTables
from dapple.planner.traffic import Floats

_SHARES = 64
_EFFORT = 500_000
_LEVELS = (48, 512)
_SLACK = 1e-9


@dataclass(frozen=True)
class Demand:
    """Costs that no plan undercuts. R shares of first replicas.

    Attributes:
        tables: for parameters and their AllReduce.
        widths: shape (R,), devices of a stage.
        both, forward, work: shape (R, N + 1), prefix sums of F + B, F, and the whole step.
        held: shape (R, N + 1), prefix sums of bytes that a stage must hold.
        memory: bytes of the largest device.
        ring_fixed, ring_rate: shape (R,), AllReduce seconds, and seconds per byte.
        speed: of the fastest device.
        forward_share: F is at least this part of F + B in every layer.
        devices: G.
    """

    tables: CostTables
    widths: Floats
    both: Floats
    forward: Floats
    work: Floats
    held: Floats
    memory: int
    ring_fixed: Floats
    ring_rate: Floats
    speed: float
    forward_share: float
    devices: int

    @classmethod
    def of(cls, problem: Problem, low: int, high: int) -> Demand:
        """The costs for all M from `low` to `high`."""
        found, tables = shares(problem, low, high, _SHARES), problem.tables(high)
        kinds = problem.cluster.kind_of_device()
        speed = max(kind.speed for kind in kinds)
        both = np.array([share.forward + share.backward for share in found]) / speed
        forward = np.array([share.forward for share in found]) / speed
        rings = [least_rings(problem, share.width) for share in found]
        held = (2 + problem.optimizer_state_factor) * tables.parameter_prefix
        parts = np.diff(forward), np.diff(both)
        ratios = np.divide(*parts, out=np.ones_like(parts[0]), where=parts[1] > 0)
        return cls(
            tables=tables,
            widths=np.array([share.width for share in found], dtype=np.float64),
            both=both,
            forward=forward,
            work=np.array([share.work for share in found]) / speed,
            held=np.array([held + tables.saved_prefix(share.first_rows) for share in found]),
            memory=max(k.memory for k in kinds) if problem.memory_is_known else 2**62,
            ring_fixed=np.array([min(fixed for fixed, _ in options) for options in rings]),
            ring_rate=np.array([min(rate for _, rate in options) for options in rings]),
            speed=speed,
            forward_share=float(ratios.min()),
            devices=problem.num_devices,
        )

    def meets(self, target: float) -> bool:
        """Whether the devices suffice for a step of `target` seconds."""
        layers = self.both.shape[1] - 1
        levels = int(np.clip(_EFFORT / (layers * len(self.widths)), *_LEVELS))
        limit = target * (1 + _SLACK)
        unit = limit / levels if limit > 0 else 1.0
        fewest = np.full((layers + 1, levels), np.inf)
        for start in range(layers):
            before = np.where(fewest[start] <= self.devices, fewest[start], np.inf)
            if start == 0 or np.isfinite(before).any():
                self._add_stage(start, before, limit, unit, fewest)
        return bool(fewest[layers].min() <= self.devices)

    def _add_stage(
        self, start: int, before: Floats, limit: float, unit: float, fewest: Floats
    ) -> None:
        """Lower the fewest devices behind every stage that begins at `start`."""
        own = self.work[:, start + 1 :] - self.work[:, start, None]
        held = self.held[:, start + 1 :] - self.held[:, start, None]
        fits = (own <= limit) & (held <= self._room)
        after = self._after(start)
        both = self.both[:, start + 1 :] - self.both[:, start, None]
        if start == 0:
            fits &= own + after <= limit
            both = both + after  # A_0 counts with every prefix.
            room = np.zeros_like(own)
            before = np.zeros(1)
        else:
            synced = limit - own - after
            fits &= synced >= 0
            share = self.forward_share
            room = np.minimum(limit - own, synced / share) if share > 0 else limit - own
            if not self.tables.linked[start]:
                before = before.min(keepdims=True)  # The stages do not wait for each other.
        stops, chosen = np.nonzero(fits.T)
        if not len(stops):
            return
        shift = np.floor(both[chosen, stops] / unit * (1 - 1e-12)).astype(np.int64)
        origin = np.arange(fewest.shape[1]) - shift[:, None]
        allowed = (origin >= 0) & (origin < len(before))
        allowed &= origin * unit <= room[chosen, stops][:, None]
        sums = before[np.clip(origin, 0, len(before) - 1)] + self.widths[chosen][:, None]
        sums[~allowed] = np.inf
        first = np.flatnonzero(np.diff(stops, prepend=-1))
        reached = np.minimum.reduceat(sums, first, axis=0)
        stop = stops[first] + start + 1
        fewest[stop] = np.minimum(fewest[stop], reached)

    @cached_property
    def _room(self) -> float:
        """Bytes for what a stage holds; a tied parameter may be counted twice in it."""
        twice = sum(g.parameter_bytes * (len(g.members) - 1) for g in self.tables.profile.tied)
        return float(self.memory) + 4.0 * twice

    def _after(self, start: int) -> Floats:
        """AllReduce and optimizer of stages that begin at `start`; shape (R, stops)."""
        stops = np.arange(start + 1, self.both.shape[1])
        own = np.maximum(self.tables.own_parameter_bytes(np.full_like(stops, start), stops), 0.0)
        reduce = self.ring_fixed[:, None] * (own > 0) + self.ring_rate[:, None] * own
        update = self.tables.optimizer_prefix[stops] - self.tables.optimizer_prefix[start]
        after: Floats = reduce + np.maximum(update, 0.0) / self.speed
        return after
