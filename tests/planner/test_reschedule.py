"""Plans for interleaved virtual stages and for zero bubble."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple.costs import CostModel
from dapple.errors import InputError, MemoryPlanError, PlanError
from dapple.planner import compare, make_plan
from dapple.planner.reschedule import _bounds, cut_anew, rescheduled
from dapple.records import ModelProfile
from dapple.schedule import SCHEDULES
from dapple.simulator import simulate
from tests.planner.instances import random_cluster, random_profile
from tests.simulator.pipelines import chain, cluster, plan

FAST = cluster(4, bandwidth=1e12)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=4),
)
def test_layers_are_cut_so_that_the_slowest_stage_is_fastest(
    seconds: list[int], rates: list[float]
):
    """Against all cuts."""
    if len(rates) > len(seconds):
        rates = rates[: len(seconds)]

    def slowest(bounds: list[int]) -> float:
        pairs = itertools.pairwise(bounds)
        return max(sum(seconds[a:b]) / r for (a, b), r in zip(pairs, rates, strict=True))

    inner = itertools.combinations(range(1, len(seconds)), len(rates) - 1)
    best = min(slowest([0, *cuts, len(seconds)]) for cuts in inner)
    found = _bounds([np.array(seconds) / rate for rate in rates])
    assert slowest(found) == pytest.approx(best)


def test_virtual_stages_take_turns_on_the_devices():
    """Stage i and i + S on the devices of stage i, K_i from the order."""
    profile = chain([1.0] * 8, [2.0] * 8)
    made = rescheduled(plan([1, 2], 8, 4, FAST, cuts=[4, 8]), profile, "interleaved", 2)
    assert [stage.devices for stage in made.stages] == [(0,), (1, 2), (0,), (1, 2)]
    assert made.positions == ((0, 2), (1, 3))
    # The second position is twice as fast and gets twice the layers.
    sizes = [stage.stop - stage.start for stage in made.stages]
    assert sizes[0] + sizes[2] < sizes[1] + sizes[3]
    assert tuple(stage.warmup for stage in made.stages) == simulate(made, profile).in_flight
    assert made.predicted is not None
    assert made.predicted.step_seconds == simulate(made, profile).step_seconds


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_a_small_bubble_makes_a_faster_plan(schedule: str):
    """Four devices of which each holds a quarter of the model, four micro-batches."""
    profile = with_memory(chain([1.0] * 8, [2.0] * 8, bytes_per_row=1.0, parameter_bytes=100 << 20))
    arguments = {"micro_batch_size": 1}
    plain = make_plan(profile, FAST, 4, **arguments)
    made = make_plan(profile, FAST, 4, schedule=schedule, **arguments)
    assert made.schedule == schedule
    assert made.predicted.step_seconds < plain.predicted.step_seconds
    assert made.virtual == (2 if schedule == "interleaved" else 1)
    assert any(schedule in note for note in made.notes)


@pytest.mark.parametrize("seed", [2, 13])
@pytest.mark.parametrize(("schedule", "virtual"), [("zero-bubble", 1), ("interleaved", 2)])
def test_plans_are_looked_for_under_their_own_schedule(seed: int, schedule: str, virtual: int):
    """Never longer than the plans for early backward put under it; they fit; mostly shorter."""
    rng = random.Random(seed)
    profile, where = random_profile(rng, 8), random_cluster(rng, 4, memory=2**30)
    made = make_plan(profile, where, 16, schedule=schedule)
    put = [
        rescheduled(make_plan(profile, where, 16, planner=name), profile, schedule, virtual)
        for name in ("dapple", "straight")
    ]
    least = min(plan.predicted.step_seconds for plan in put)
    assert made.predicted.step_seconds <= least * (1 + 1e-9)
    assert all(stage.peak_bytes <= 2**30 for stage in made.predicted.stages)
    assert made.predicted.step_seconds == pytest.approx(simulate(made, profile).step_seconds)
    assert made.predicted.lower_bound_seconds is None


def test_any_schedule_is_the_best_of_all():
    """Of early backward, GPipe, zero bubble and interleaved; the plan says which it is."""
    profile = with_memory(chain([1.0] * 8, [2.0] * 8, bytes_per_row=1.0, parameter_bytes=100 << 20))
    steps = {
        name: make_plan(profile, FAST, 4, schedule=name, micro_batch_size=1)
        for name in (*SCHEDULES, "any")
    }
    best = steps.pop("any")
    shortest = min(plan.predicted.step_seconds for plan in steps.values())
    assert best.predicted.step_seconds == pytest.approx(shortest)
    assert best.schedule in ("zero-bubble", "interleaved")


def test_memory_too_small_for_the_best_order_holds_a_slower_one():
    """Early backward's counts do not fit under zero bubble, others do."""
    profile = with_memory(chain([1.0] * 2, [2.0] * 2), saved=300 << 20)
    options = {"planner": "straight", "micro_batch_size": 1}
    plain = make_plan(profile, cluster(2), 4, **options)
    with pytest.raises(MemoryPlanError, match="under zero-bubble"):
        rescheduled(plain, profile, "zero-bubble")
    made = make_plan(profile, cluster(2), 4, schedule="zero-bubble", **options)
    assert all(stage.peak_bytes <= 2**30 for stage in made.predicted.stages)


def test_virtual_stages_keep_their_optimizer_whole():
    """The runtime shares it out for one stage per device only."""
    layer = chain([1.0], [2.0], parameter_bytes=1 << 20).layers[0]
    layers = [
        layer.model_copy(update={"name": f"l{n}", "optimizer_seconds": 9.0}) for n in range(4)
    ]
    profile = with_memory(chain([1.0] * 4, [2.0] * 4).model_copy(update={"layers": tuple(layers)}))
    plain, made = (
        make_plan(profile, FAST, 4, shard=True, schedule=s)
        for s in ("early-backward", "interleaved")
    )
    assert "optimizer" in {stage.shard for stage in plain.stages}
    assert {stage.shard for stage in made.stages} == {"none"}


def with_memory(profile: ModelProfile, saved: int = 1) -> ModelProfile:
    """The profile with saved bytes, so that memory counts."""
    layers = [layer.model_copy(update={"saved_bytes": (saved,)}) for layer in profile.layers]
    return profile.model_copy(update={"layers": tuple(layers)})


def test_what_does_not_fit_is_refused_with_a_reason():
    """Too few layers for the stages, too little memory for what waits, too few stages."""
    profile = with_memory(chain([1.0] * 2, [2.0] * 2), saved=300 << 20)
    made = plan([1, 1], 4, 4, FAST, warmup=[2, 1])
    with pytest.raises(PlanError, match=r"need 4 layers, but the model has 2; use fewer"):
        rescheduled(made, profile, "interleaved", 2)
    with pytest.raises(
        MemoryPlanError, match=r"under zero-bubble stage 1 needs 1\.2 GiB of 1\.0 GiB"
    ):
        rescheduled(made, profile, "zero-bubble")
    with pytest.raises(InputError, match="0 stages per device are impossible"):
        make_plan(profile, FAST, 4, schedule="interleaved", virtual=0)


def test_recomputed_ranges_are_not_cut_apart():
    """Whole stages stay whole."""
    profile = chain([1.0] * 8, [2.0] * 8)
    made = plan([1, 1], 4, 4, FAST, cuts=[4, 8])
    ranged = made.stages[0].model_copy(update={"recompute": ((0, 2),)})
    model = CostModel(profile, FAST)
    with pytest.raises(PlanError, match="recomputes ranges"):
        cut_anew(model, (ranged, made.stages[1]), 2, 1)
    whole = made.stages[0].model_copy(update={"recompute": True})
    assert [s.recompute for s in cut_anew(model, (whole, made.stages[1]), 2, 1)] == [
        True, False, True, False,
    ]  # fmt: skip


def test_a_comparison_shows_the_plan_under_the_other_schedules():
    """The same devices and micro-batches, simulated in the same way."""
    profile = with_memory(chain([1.0] * 8, [2.0] * 8, bytes_per_row=1.0, parameter_bytes=100 << 20))
    rows = {row.planner: row for row in compare(profile, FAST, 4, micro_batch_size=1)}
    found = {name: row.plan for name, row in rows.items() if name.startswith("dapple:")}
    assert set(found) == {"dapple:gpipe", "dapple:interleaved", "dapple:zero-bubble"}
    for name, made in found.items():
        assert made is not None
        assert made.schedule == name.split(":")[1]
        expected = simulate(made, profile).step_seconds
        assert rows[name].step_seconds == pytest.approx(expected)
