"""The plan is the best there is: against an enumeration of all contiguous plans."""

from __future__ import annotations

import random

import pytest

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.errors import MemoryPlanError
from dapple.planner import SearchOptions, make_plan, search
from dapple.records import LayerProfile, ModelProfile, TensorProfile
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


@pytest.mark.parametrize("exact", [True, False])
def test_a_machine_with_a_slow_card_is_left_out(exact: bool) -> None:
    """Of three machines that are alike but for one's network card, two stages take the others."""
    layer = LayerProfile(
        name="l",
        forward_seconds=(0.01,),
        backward_seconds=(0.02,),
        parameter_bytes=10**9,
        saved_bytes=(1,),
    )
    sent = TensorProfile(name="t", producer=0, consumers=(1,), bytes_per_sample=1e6)
    profile = ModelProfile(
        model="m", device="d", batch_sizes=(1,), layers=(layer,) * 2, tensors=(sent,)
    )
    kind, inside = DeviceKind(name="d", memory=5 * 10**9), Link(bandwidth=1e9)
    machines = tuple(
        Machines(devices=1, kind=kind, inside=inside, outside=Link(bandwidth=rate))
        for rate in (1e6, 1e9, 1e9)
    )
    cluster = Cluster(name="odd", machines=machines)
    options = SearchOptions(baselines=False, exact=exact)
    plan = search(profile, cluster, 8, micro_batch_size=1, options=options).plan
    assert {device for stage in plan.stages for device in stage.devices} == {1, 2}
