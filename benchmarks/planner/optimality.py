"""How close the general search comes to the best plan, and the bound to both.

    python -m benchmarks.planner.optimality [instances]

Random chains of up to 8 uneven layers on up to 6 devices in one or two levels are brute-forced over
all contiguous plans with consecutive devices (fixed micro-batch, warm-up policy A, no recompute).
The search runs without its exact mode and without baselines. Goals: step over optimum on average
<= 1.002, at most 1.02; the bound on average within 5 % of the optimum, and never above it. On
chains of 16 layers and 8 devices, too many to enumerate: the gap to the bound on average <= 10 %.
"""

from __future__ import annotations

import random
import statistics
import sys

from tests.planner.instances import brute_force, random_cluster, random_profile

from dapple.planner import SearchOptions, search

ALONE = SearchOptions(baselines=False, exact=False)


def small(count: int) -> None:
    """Against the enumeration."""
    rng = random.Random(2021)
    ratios: list[float] = []
    bounds: list[float] = []
    for _ in range(count):
        profile = random_profile(rng, rng.randint(2, 8))
        cluster = random_cluster(rng, rng.randint(2, 6))
        batch, size = rng.choice((8, 12, 16, 24)), rng.randint(1, 3)
        best = brute_force(profile, cluster, batch, size)
        assert best is not None
        predicted = search(
            profile, cluster, batch, micro_batch_size=size, warmup="A", options=ALONE
        ).plan.predicted
        assert predicted is not None
        assert predicted.lower_bound_seconds is not None
        assert predicted.lower_bound_seconds <= best[0] * (1 + 1e-9)
        ratios.append(predicted.step_seconds / best[0])
        bounds.append(predicted.lower_bound_seconds / best[0])
    print(f"{count} instances, N <= 8, G <= 6, against the best contiguous plan:")
    print(f"  step    mean {statistics.mean(ratios):.4f}  max {max(ratios):.4f}")
    print(f"  bound   mean {statistics.mean(bounds):.4f}  min {min(bounds):.4f}", flush=True)


def medium(count: int) -> None:
    """Against the bound."""
    rng = random.Random(2022)
    gaps = []
    for _ in range(count):
        profile, cluster = random_profile(rng, 16), random_cluster(rng, 8)
        predicted = search(profile, cluster, 64, micro_batch_size=4, options=ALONE).plan.predicted
        assert predicted is not None
        assert predicted.lower_bound_seconds is not None
        gaps.append(predicted.step_seconds / predicted.lower_bound_seconds - 1)
    print(f"{count} instances, N = 16, G = 8: gap to the bound")
    print(f"  mean {statistics.mean(gaps):.1%}  max {max(gaps):.1%}")


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    small(number)
    medium(max(1, number // 4))
