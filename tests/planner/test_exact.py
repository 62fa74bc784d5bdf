"""The plan is the best there is: against an enumeration of all contiguous plans."""

from __future__ import annotations

import random

import pytest

from dapple.errors import MemoryPlanError
from dapple.planner import make_plan
from tests.planner.instances import MIB, brute_force, random_cluster, random_profile


def _instances(seed: int, count: int) -> list[tuple[int, int, int, int, int]]:
    rng = random.Random(seed)
    return [
        (
            rng.randrange(10**9),
            rng.randint(1, 6),
            rng.randint(1, 4),
            rng.choice((4, 7, 8, 13)),
            rng.randint(1, 3),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("seed", "layers", "devices", "batch", "size"), _instances(1, 45))
def test_no_contiguous_plan_is_faster(
    seed: int, layers: int, devices: int, batch: int, size: int
) -> None:
    """With ample memory no plan with consecutive devices has a shorter simulated step."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, layers), random_cluster(rng, devices)
    best = brute_force(profile, cluster, batch, size)
    assert best is not None
    plan = make_plan(profile, cluster, batch, micro_batch_size=size)
    assert plan.predicted is not None
    assert plan.predicted.step_seconds <= best[0] * 1.01


@pytest.mark.parametrize(("seed", "layers", "devices", "batch", "size"), _instances(2, 25))
def test_no_fitting_plan_is_faster(
    seed: int, layers: int, devices: int, batch: int, size: int
) -> None:
    """With scarce memory the plan fits, and no fitting one with consecutive devices is faster."""
    rng = random.Random(seed)
    profile = random_profile(rng, layers)
    cluster = random_cluster(rng, devices, memory=round(rng.uniform(200, 900)) * MIB)
    best = brute_force(profile, cluster, batch, size)
    if best is None:
        with pytest.raises(MemoryPlanError):
            make_plan(profile, cluster, batch, micro_batch_size=size)
        return
    plan = make_plan(profile, cluster, batch, micro_batch_size=size)
    assert plan.predicted is not None
    assert plan.predicted.step_seconds <= best[0] * 1.01
    memory = cluster.kind_of_device()[0].memory
    assert all(s.peak_bytes is not None and s.peak_bytes <= memory for s in plan.predicted.stages)
