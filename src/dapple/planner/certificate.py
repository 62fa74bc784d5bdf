"""A lower bound on the step of every plan: no cuts, replicas, devices or M can be faster.

For a step of T seconds every stage s must satisfy (its busiest replica's work W_s lies between the
first micro-batch's way to it and the last one's back; where devices are equally fast that is the
first replica, and so are those on the way: see `shares`, and `mixed` for other devices)

    A_0 + sum_{a<s} (F_a + B_a) + W_s <= T        and        sum_{a<s} F_a + W_s + A_s <= T

A dynamic programme finds out whether T can be met at all: over (layers, devices, replicas of the
last stage) on small clusters, see `relaxed`, and with the fewest devices for each prefix on large
ones, see `demand`. The largest T that can't is the bound. What is relaxed: contention, warm-up,
placement (every link is the best one of the cluster, every device the largest, and a stage's speed any
part of the cluster's), and the tied parameters' AllReduce.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from dapple.planner.demand import Demand
from dapple.planner.mixed import units_of
from dapple.planner.problem import Problem
from dapple.planner.relaxed import meets, relax

_CLOSE = 1.005
"""The bound is found up to this factor."""
_NARROW = 1.06
"""Ranges of M that are narrower than this are not split."""
_GROUPS = 300
"""Ranges of M that are looked at before their bounds are taken as they are."""
_SMALL = 1_000
"""Devices x layers up to which the device count is part of the state."""

Meets = Callable[[float], bool]


def lower_bound(problem: Problem, step_seconds: float, micro_batches: int) -> float:
    """Seconds below which no plan's step can lie.

    Args:
        problem: profile, cluster and batch; with a given micro-batch size M is given too.
        step_seconds: the step of some plan; the search for the bound starts here.
        micro_batches: M of that plan, where the bound is probably decided.
    """
    bound = _largest_unmet(_checker(problem, micro_batches, micro_batches), step_seconds)
    if problem.micro_batch_size is not None:
        return bound
    groups = _groups(problem.global_batch_size)
    # The nearest ranges first: they lower the bound most, and the others are then done with soon.
    groups.sort(key=lambda group: -abs(math.log(group[1] / micro_batches)))
    for looked_at in range(problem.global_batch_size + len(groups)):
        if not groups:
            break
        low, high = groups.pop()
        last = high <= low * _NARROW or looked_at >= _GROUPS
        meets_target = _checker(problem, low, high, rough=not last)
        if not meets_target(bound):
            continue
        if last:
            bound = _largest_unmet(meets_target, bound)
        else:
            middle = (low + high) // 2
            groups += [(middle + 1, high), (low, middle)]
    return bound


def _groups(batch: int) -> list[tuple[int, int]]:
    """Ranges of M that together are 1..batch."""
    ends = sorted({*range(1, min(batch, 4) + 1), *(2**k for k in range(batch.bit_length())), batch})
    return [(before + 1, end) for before, end in itertools.pairwise([0, *ends])]


def _checker(problem: Problem, low: int, high: int, rough: bool = False) -> Meets:
    if units_of(problem).total * problem.num_layers <= _SMALL:
        relaxed = relax(problem, low, high)
        return lambda target: meets(relaxed, target)
    return Demand.of(problem, low, high, rough).meets


def _largest_unmet(meets_target: Meets, high: float) -> float:
    """The largest T, up to a factor, that the relaxed costs do not allow; at most `high`."""
    if not meets_target(high):
        return high
    low, step = high, 0.9
    while high > 0:
        low, step = high * step, step * step
        if not meets_target(low):
            break
        high = low
        if step < 1e-9:
            return 0.0
    while high > low * _CLOSE:
        middle = (low + high) / 2
        low, high = (low, middle) if meets_target(middle) else (middle, high)
    return low
