"""Devices that any plan needs for a step of T seconds, as if every layer had devices of its own.

A stage of n devices whose first replica works W = sum_l W_l seconds, p seconds after the step's begin
and before its end, needs W + p <= T, so n >= sum_l n W_l f(p) with f(p) = 1 / (T - p). With p_l, a
micro-batch's way through all layers before l, and a micro-batch's share b of the work, p_l - p is at
most b T, and on average over the stage's work at most b T / 2. Tangents of f at z_l, which is about
b T / 2 before the quickest way q_l to the layer, give

    G >= sum_l n W_l [ f(z_l) + f'(z_l) (p_l - q_l) ]

where each layer may have the share that suits it best: a fast look at whether T can be met at all,
and at what the layers behind every cut need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dapple.planner.layers import prefix
from dapple.planner.shares import Shares
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
        cheapest = np.where(np.isfinite(cheapest), cheapest, 0.0)
        least = target * 1e-12 + 1e-300
        ways, own = self.quickest[:-1] + delays[:, None], self.own * target
        # The average counts with f', which differs by this factor within a stage.
        differs = (1 + own / np.maximum(target - ways.max(axis=1, keepdims=True), least)) ** 2
        each = 1 / np.maximum(target - ways + own * np.minimum(differs / 2, 1.0), least)
        slope = cheapest * each * each
        later = prefix(slope[:, ::-1])[:, -2::-1]
        if len(delays) == 1:
            terms = (costs * each + self.extra * later).min(axis=0, keepdims=True)
        else:
            terms = np.full_like(each, np.inf)
            for cost, extra in zip(costs, self.extra, strict=True):
                np.minimum(terms, cost * each + extra * later, out=terms)
        return prefix(terms[:, ::-1])[:, ::-1] * (1 - _SLACK)
