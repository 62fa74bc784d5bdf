"""What rows in proportion to speed gain on clusters whose devices differ, and how good plans are there.

    python -m benchmarks.planner.mixed [instances]

First, a chain of 40 uneven layers on a few mixed clusters: the step with even rows only, the plan's,
its gap to the bound, processor seconds of both searches. Then random chains of up to 6 layers on up to
4 devices of up to 3 speeds against all plans with consecutive devices, each stage with even rows or
with rows in proportion (fixed micro-batch, policy A; the search without exact mode and baselines).
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time

from tests.planner.instances import random_profile

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.planner import SearchOptions, search
from dapple.planner.exact import all_bounds
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.records import Plan

EVEN = SearchOptions(proportional=False, certificate=False)
ALONE = SearchOptions(baselines=False, exact=False)
CLUSTERS = {
    "8 + 8 at 0.5": ((1, 8, 1.0), (1, 8, 0.5)),
    "2 x 4 + 8 at 0.35": ((2, 4, 1.0), (1, 8, 0.35)),
    "2 + 1 at 0.5 + 1 at 0.25": ((1, 2, 1.0), (1, 1, 0.5), (1, 1, 0.25)),
    "4 x 8 + 4 x 8 at 0.6": ((4, 8, 1.0), (4, 8, 0.6)),
}
"""Count, devices and speed of the machines."""


def cluster(groups: tuple[tuple[int, int, float], ...]) -> Cluster:
    """Machines with fast links inside and 3 GB/s between."""
    return Cluster(
        name="mixed",
        machines=tuple(
            Machines(
                count=count,
                devices=devices,
                kind=DeviceKind(name=f"speed {speed}", memory=16 * 2**30, speed=speed),
                inside=Link(bandwidth=130e9, latency=5e-6),
                outside=Link(bandwidth=3e9, latency=30e-6),
            )
            for count, devices, speed in groups
        ),
    )


def large() -> None:
    """Even rows beside the search's choice."""
    profile = random_profile(random.Random(1), 40)
    for name, groups in CLUSTERS.items():
        where, seconds, plans = cluster(groups), [], []
        for options in (EVEN, SearchOptions()):
            begun = time.process_time()
            plans.append(search(profile, where, 128, options=options).plan)
            seconds.append(time.process_time() - begun)
        even, (bound, step) = _step(plans[0]), (_bound(plans[1]), _step(plans[1]))
        used = "in proportion" if any(stage.rows for stage in plans[1].stages) else "even"
        print(
            f"{name:26}  even {even:7.3f} s  plan {step:7.3f} s ({even / step:.3f}x)  {used:13}  "
            f"gap {step / bound - 1:5.1%}  CPU {seconds[0]:.1f} and {seconds[1]:.1f} s",
            flush=True,
        )
        assert step <= even * (1 + 1e-9)


def small(count: int) -> None:
    """Against the enumeration."""
    rng, ratios, bounds = random.Random(2021), [], []
    for _ in range(count):
        profile = random_profile(rng, rng.randint(2, 6))
        speeds = [rng.choice((0.25, 0.4, 0.6, 1.0)) for _ in range(rng.randint(2, 4))]
        where, size = cluster(tuple((1, 1, speed) for speed in speeds)), rng.randint(2, 6)
        ways = [Problem(profile, where, 24, micro_batch_size=size, proportional=p) for p in (0, 1)]
        best = _brute_force(ways)
        plan = search(profile, where, 24, micro_batch_size=size, warmup="A", options=ALONE).plan
        ratios.append(_step(plan) / best)
        bounds.append(_bound(plan) / best)
    print(
        f"{count} small instances: step over optimum mean {statistics.mean(ratios):.4f}, "
        f"max {max(ratios):.4f}; bound mean {statistics.mean(bounds):.3f}, min {min(bounds):.3f}"
    )
    assert max(bounds) <= 1 + 1e-9


def _brute_force(ways: list[Problem]) -> float:
    problem, best = ways[0], float("inf")
    layers, devices, (count,) = problem.num_layers, problem.num_devices, problem.micro_batch_counts
    for stages in range(1, min(layers, devices) + 1):
        for ends in itertools.combinations(range(1, devices + 1), stages):
            sets = tuple(tuple(range(a, b)) for a, b in itertools.pairwise((0, *ends)))
            for bounds in all_bounds(layers, stages).tolist():
                fits = [way.fit(Layout(tuple(bounds), sets, count), "") for way in ways]
                found = [fit for fit in fits if not isinstance(fit, Refusal)]
                for chosen in set(itertools.product(*zip(*found, strict=True))):
                    best = min(best, problem.step_seconds(chosen, count))
    return best


def _step(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


def _bound(plan: Plan) -> float:
    assert plan.predicted is not None
    assert plan.predicted.lower_bound_seconds is not None
    return plan.predicted.lower_bound_seconds


if __name__ == "__main__":
    large()
    small(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
