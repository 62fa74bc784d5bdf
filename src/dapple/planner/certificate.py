"""A lower bound on the step of every plan: no cuts, replicas, devices or M can be faster.

For a step of T seconds every stage s must satisfy (its busiest replica's work W_s lies between the
first micro-batch's way to it and the last one's back; where devices are equally fast that is the
first replica, and so are those on the way, see `shares`; for others see `mixed`)

    A_0 + sum_{a<s} (F_a + B_a) + W_s <= T        and        sum_{a<s} F_a + W_s + A_s <= T

A dynamic programme finds out whether T can be met at all: over (layers, devices, replicas of the
last stage) on small clusters, see `relaxed`, and over (layers, devices) on large ones, see
`demand`. The largest T that can't is the bound. What is relaxed: contention, warm-up, placement
(every link is the best one of the cluster, every device the largest, and a stage's speed any part of
the cluster's), and the tied parameters' AllReduce.

All M count, one range of equal micro-batches after the other, the ones that need the fewest
devices by `fluid` first; most ranges are done with by that. The search asks as well, before it looks
at an M: what is found out then is not found out again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from dapple.planner.demand import Demand
from dapple.planner.fluid import Fluid
from dapple.planner.mixed import all_shares, ranges, units_of
from dapple.planner.problem import Problem
from dapple.planner.relaxed import meets, relax

_CLOSE = 1.002
"""The bound is found up to this factor."""
_NOTHING = 1e-12
"""Steps as short as this, relatively, may be none at all."""
_SMALL = 1_000
"""Devices x layers up to which the replicas of the last stage are part of the state."""


class Prospects:
    """What each range of M allows, found out when it is asked for.

    Args:
        problem: profile, cluster and batch; with a given micro-batch size M is given too.
    """

    def __init__(self, problem: Problem) -> None:
        self._total = units_of(problem).total
        self.checks = [_Check(problem, low, high) for low, high in ranges(problem)]

    def allow(self, micro_batches: int, step_seconds: float) -> bool:
        """Whether a step of so many seconds may be possible; False: it is not, with this M."""
        check = next(check for check in self.checks if check.holds(micro_batches))
        return self.may_reach(check, step_seconds) and check.allows(step_seconds)

    def may_reach(self, check: _Check, step_seconds: float) -> bool:
        """Whether the cluster has as many devices as that takes."""
        return check.needed(step_seconds) <= self._total


def lower_bound(
    problem: Problem,
    step_seconds: float,
    micro_batches: int,
    prospects: Prospects | None = None,
) -> float:
    """Seconds below which no plan's step can lie.

    Args:
        problem: profile, cluster and batch; with a given micro-batch size M is given too.
        step_seconds: the step of some plan; the bound is never above.
        micro_batches: M of that plan. Its range is looked at first, since it probably decides.
        prospects: of the same problem, with what is known already.
    """
    prospects = prospects or Prospects(problem)

    def order(check: _Check) -> tuple[bool, float]:
        return not check.holds(micro_batches), check.needed(step_seconds)

    bound = step_seconds
    for check in sorted(prospects.checks, key=order):
        if prospects.may_reach(check, bound):
            bound = check.lowered(bound)
    return bound


class _Check:
    """What a range of M allows.

    Args:
        problem: what is planned.
        low, high: one of `row_ranges`, or one M of it.
    """

    def __init__(self, problem: Problem, low: int, high: int) -> None:
        self._problem = problem
        self._found = all_shares(problem, low, high)
        tables, speed = problem.layer_tables, max(problem.speeds)
        self._fluid = Fluid.of(self._found, speed, bool(tables.linked[1:-1].all()))
        self._refuted, self._allowed = 0.0, math.inf

    def needed(self, target: float) -> float:
        """Units of the cluster's devices that a step of so many seconds takes at least."""
        return float(self._fluid.needed(target, np.zeros(1))[0, 0])

    def holds(self, micro_batches: int) -> bool:
        """Whether this M is in the range."""
        return self._found.low <= micro_batches <= self._found.high

    @cached_property
    def _test(self) -> Callable[[float], bool]:
        if units_of(self._problem).total * self._problem.num_layers <= _SMALL:
            relaxed = relax(self._problem, self._found, self._fluid)
            return lambda target: meets(relaxed, target)
        return Demand.of(self._problem, self._found).meets

    def allows(self, target: float) -> bool:
        """Whether some plan may take so many seconds; what is shorter than what none can, none can."""
        if self._refuted < target < self._allowed:
            if self._test(target):
                self._allowed = target
            else:
                self._refuted = target
        return target > self._refuted

    def lowered(self, high: float) -> float:
        """The largest T, up to a factor, that no plan with these M meets, if it is below `high`."""
        if not self.allows(high):
            return high
        nothing = high * _NOTHING
        least = self._fluid.least_seconds(units_of(self._problem).total, high)
        low, ratio = max(high / _CLOSE, least), _CLOSE
        while low > least and self.allows(low):
            high, ratio = low, ratio * ratio
            low = max(high / ratio, least)
        while high > max(low * _CLOSE, nothing):
            middle = (low + high) / 2
            low, high = (low, middle) if self.allows(middle) else (middle, high)
        return low
