"""Warm-up policies, tuned counts and recomputation."""

from __future__ import annotations

import itertools
import random

import pytest

from dapple.cluster import Cluster, DeviceKind, Link, Machines, preset
from dapple.costs import CostModel
from dapple.errors import MemoryPlanError
from dapple.planner import make_plan
from dapple.planner.warmup import raise_warmup, tune_warmup
from dapple.records import LayerProfile, ModelProfile, StagePlan, TensorProfile
from dapple.simulator import step_seconds
from tests.planner.instances import MIB, random_cluster, random_profile


def _slow_links(parameters: int = MIB) -> tuple[ModelProfile, Cluster]:
    """Four layers of 3 ms on four machines, 2 ms for each transfer of a row."""
    layer = LayerProfile(
        name="l",
        forward_seconds=(0.001,),
        backward_seconds=(0.002,),
        parameter_bytes=parameters,
        saved_bytes=(MIB,),
    )
    tensors = tuple(
        TensorProfile(name=f"t{n}", producer=n, consumers=(n + 1,), bytes_per_sample=2e6)
        for n in range(3)
    )
    profile = ModelProfile(
        model="slow", device="d", batch_sizes=(1,), layers=(layer,) * 4, tensors=tensors
    )
    kind = DeviceKind(name="d", memory=2**30)
    link = Link(bandwidth=1e9)
    group = Machines(count=4, devices=1, kind=kind, inside=link, outside=link)
    return profile, Cluster(name="slow", machines=(group,))


def test_policy_b_wins_where_transfers_count() -> None:
    """Policy B keeps the stages busy that policy A lets wait for transfers."""
    profile, cluster = _slow_links()
    seconds = {}
    for policy in ("A", "B"):
        plan = make_plan(profile, cluster, 16, micro_batch_size=1, planner="even", warmup=policy)
        assert plan.predicted is not None
        seconds[policy] = plan.predicted.step_seconds
        assert [s.warmup for s in plan.stages] == ([4, 3, 2, 1] if policy == "A" else [7, 5, 3, 1])
    assert seconds["B"] < 0.8 * seconds["A"]
    best = make_plan(profile, cluster, 16, micro_batch_size=1, planner="even")
    assert best.predicted is not None
    assert best.predicted.step_seconds <= seconds["B"] * (1 + 1e-9)


def test_counts_that_memory_makes_equal_are_spread_out() -> None:
    """Stages of equal counts take turns, so that of few micro-batches in flight some are given up."""
    stages = tuple(
        StagePlan(start=n, stop=n + 1, devices=(n,), warmup=k) for n, k in enumerate((4, 4, 4, 1))
    )
    profile, cluster = _slow_links()
    model = CostModel(profile, cluster)

    def seconds(tried: tuple[StagePlan, ...]) -> float:
        return step_seconds(model, tried, 16, 16)

    tuned, best = tune_warmup(stages, [4, 4, 4, 4], seconds)
    assert [stage.warmup for stage in tuned] == [4, 3, 2, 1]
    assert best < 0.7 * seconds(stages)


def test_counts_are_raised_as_far_as_each_stage_has_room() -> None:
    """Where a later stage holds fewer than the first, the ones behind it still do not take turns."""
    stages = tuple(StagePlan(start=n, stop=n + 1, devices=(n,), warmup=1) for n in range(4))
    profile, cluster = _slow_links()
    model = CostModel(profile, cluster)

    def seconds(tried: tuple[StagePlan, ...]) -> float:
        return step_seconds(model, tried, 16, 16)

    raised, best = raise_warmup(stages, [9, 4, 9, 9], seconds)
    assert [stage.warmup for stage in raised] == [7, 4, 3, 1]
    assert best < 0.9 * min(
        seconds(
            tuple(
                stage.model_copy(update={"warmup": k})
                for stage, k in zip(stages, counts, strict=True)
            )
        )
        for counts in ([2, 2, 2, 2], [9, 4, 4, 4])
    )


@pytest.mark.parametrize("seed", range(6))
def test_tuned_counts_are_the_smallest_with_the_best_step(seed: int) -> None:
    """No lower count at one stage keeps the step, and no policy is faster."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, 5), random_cluster(rng, 3)
    model = CostModel(profile, cluster)
    bounds = [0, 2, 4, 5]
    stages = tuple(
        StagePlan(start=a, stop=b, devices=(s,), warmup=3 - s)
        for s, (a, b) in enumerate(itertools.pairwise(bounds))
    )

    def seconds(tried: tuple[StagePlan, ...]) -> float:
        return step_seconds(model, tried, 8, 8)

    tuned, step = tune_warmup(stages, [8, 8, 8], seconds)
    assert step == seconds(tuned) <= seconds(stages)
    for number, stage in enumerate(tuned):
        following = tuned[number + 1].warmup if number + 1 < len(tuned) else 1
        if stage.warmup > following:
            fewer = stage.model_copy(update={"warmup": stage.warmup - 1})
            changed = (*tuned[:number], fewer, *tuned[number + 1 :])
            assert seconds(changed) > step * (1 + 1e-9)


def test_recomputation_makes_it_fit() -> None:
    """A model whose activations do not fit is refused, or recomputed."""
    layer = LayerProfile(
        name="l",
        forward_seconds=(0.001,),
        backward_seconds=(0.002,),
        parameter_bytes=MIB,
        saved_bytes=(30 * MIB,),
    )
    profile = ModelProfile(model="deep", device="d", batch_sizes=(1,), layers=(layer,) * 4)
    cluster = preset("config-a:1x2").with_memory("76 MiB")
    plain = make_plan(profile, cluster, 8, micro_batch_size=1, planner="even")
    assert [stage.warmup for stage in plain.stages] == [1, 1]
    plan = make_plan(profile, cluster, 8, micro_batch_size=1, planner="even", recompute=True)
    assert [stage.recompute for stage in plan.stages] == [True, False]
    assert plan.stages[0].warmup > 1
    assert plan.simulate_only == ()
    with pytest.raises(MemoryPlanError):
        make_plan(profile, cluster.with_memory("60 MiB"), 8, planner="dp")


def test_wanted_policy_is_kept() -> None:
    """A policy that is asked for is the plan's."""
    profile, cluster = _slow_links()
    plan = make_plan(profile, cluster, 8, micro_batch_size=1, warmup="A")
    assert all(s.warmup <= plan.num_stages - n for n, s in enumerate(plan.stages))
