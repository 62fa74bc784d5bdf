"""Devices that any plan needs for a step of T seconds, as if every layer had devices of its own.

A stage s of n devices whose first replica works W seconds, p seconds after the step's begin and
before its end, needs W + p <= T. So its layers need n W_l / (T - p) devices between them, and with
p_l, one micro-batch's way through all layers before l, of which at most b T lie in l's own stage,

    G >= sum_l n W_l / (T - max(0, p_l - b T))

Each term is convex in p_l. A tangent where all layers before l are at their quickest makes the sum
one over layers, each with the share that suits it best: a fast look at whether T can be met at all,
and at what is missing behind every cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dapple.planner.shares import Shares, prefix
from dapple.planner.traffic import Floats

_SLACK = 1e-9
_CLOSE = 1.002
"""The least step is found up to this factor."""


@dataclass(frozen=True)
class Fluid:
    """Costs of layers. R shares of N layers.

    Attributes:
        work: shape (R, N), seconds of the first replica's whole step.
        device_seconds: shape (R, N), the same times the devices.
        extra: shape (R, N), how much longer than at its quickest a micro-batch's way takes.
        quickest: shape (N + 1,), the quickest way through all layers before each cut.
        own: b.
        linked: every stage waits for the one before it; else nobody is taken to wait.
    """

    work: Floats
    device_seconds: Floats
    extra: Floats
    quickest: Floats
    own: float
    linked: bool

    @classmethod
    def of(cls, found: Shares, speed: float, linked: bool) -> Fluid:
        """The costs for all M of a range.

        Args:
            found: the shares.
            speed: of the fastest device.
            linked: as above.
        """
        both, work = (found.forward + found.backward) / speed, found.work / speed
        both = both if linked else np.zeros_like(both)
        least = both.min(axis=0)
        own = np.divide(both, work, out=np.zeros_like(both), where=work > 0).max()
        return cls(
            work=work,
            device_seconds=work * found.units[:, None],
            extra=both - least,
            quickest=prefix(least),
            own=float(own),
            linked=linked,
        )

    def least_seconds(self, devices: int, most: float) -> float:
        """A step for which so many devices do not suffice; close to the longest, at most `most`."""
        now = np.zeros(1)
        if self.needed(most, now)[0, 0] > devices:
            return most
        low, high = float(self.device_seconds.min(axis=0).sum()) / devices * (1 - _SLACK), most
        while high > low * _CLOSE:
            middle = (low + high) / 2
            few = self.needed(middle, now)[0, 0] <= devices
            low, high = (low, middle) if few else (middle, high)
        return low

    def needed(self, target: float, delays: Floats) -> Floats:
        """Devices for the layers behind each cut, at least.

        Args:
            target: T, seconds.
            delays: shape (D,), how much later than at the quickest a micro-batch gets to the cut.

        Returns:
            Shape (D, N + 1); infinite where no number suffices.
        """
        costs = np.where(self.work <= target * (1 + _SLACK), self.device_seconds, np.inf)
        cheapest = costs.min(axis=0)
        before = np.maximum(self.quickest[:-1] - self.own * target, 0.0)
        left = target - before - delays[:, None]
        each = 1 / np.maximum(left, target * 1e-12 + 1e-300)
        rises = (before > 0) & np.isfinite(cheapest)
        slope = np.where(rises, np.where(rises, cheapest, 0.0) * each * each, 0.0)
        later = np.flip(prefix(np.flip(slope, axis=1)), axis=1)[:, 1:]
        terms = np.full_like(each, np.inf)
        for cost, extra in zip(costs, self.extra, strict=True):
            np.minimum(terms, cost * each + extra * later, out=terms)
        return np.flip(prefix(np.flip(terms, axis=1)), axis=1) * (1 - _SLACK)
