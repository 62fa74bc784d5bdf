"""make_plan: baselines, ties, refusals, determinism, odd inputs."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, preset
from dapple.errors import InputError, MemoryPlanError, PlanError
from dapple.planner import PLANNERS, make_plan, search
from dapple.planner.balance import balanced_bounds
from dapple.planner.exact import all_bounds
from dapple.records import LayerProfile, ModelProfile
from dapple.schedule import check_schedule, make_schedule
from dapple.simulator import simulate
from tests.planner.instances import MIB, random_cluster, random_profile
from tests.planner.strategies import clusters, profiles


def _profile(layers: int = 4, parameters: int = MIB, saved: int = MIB) -> ModelProfile:
    layer = LayerProfile(
        name="l",
        forward_seconds=(0.001,),
        backward_seconds=(0.002,),
        parameter_bytes=parameters,
        saved_bytes=(saved,),
    )
    return ModelProfile(model="same", device="d", batch_sizes=(1,), layers=(layer,) * layers)


@settings(max_examples=60, deadline=None)
@given(
    profiles(),
    clusters(),
    st.integers(1, 13),
    st.none() | st.integers(1, 13),
    st.sampled_from(["early-backward", "gpipe"]),
)
def test_odd_inputs_give_a_valid_plan_or_a_plan_error(
    profile: ModelProfile, cluster: Cluster, batch: int, micro_batch: int | None, schedule: str
) -> None:
    """Whatever the input, the plan validates, fits, and beats the baselines; or a PlanError."""
    size = None if micro_batch is None else min(micro_batch, batch)
    try:
        result = search(profile, cluster, batch, micro_batch_size=size, schedule=schedule)
    except PlanError:
        return
    plan = result.plan
    warmup = [stage.warmup for stage in plan.stages]
    check_schedule(make_schedule(plan.schedule, plan.num_micro_batches, warmup), warmup)
    assert plan.predicted is not None
    step = simulate(plan, profile, spans=False).step_seconds
    assert plan.predicted.step_seconds == pytest.approx(step)
    for candidate in result.candidates.values():
        assert step <= candidate.step_seconds * (1 + 1e-9)
    kinds = cluster.kind_of_device()
    for stage, predicted in zip(plan.stages, plan.predicted.stages, strict=True):
        if predicted.peak_bytes is not None and len(set(kinds)) == 1:
            assert predicted.peak_bytes <= kinds[stage.devices[0]].memory


def test_uniform_model_on_fast_links_is_one_stage() -> None:
    """Where a pipeline gains nothing, ties go to fewer stages."""
    plan = make_plan(_profile(), preset("config-a:1x1"), 8)
    assert plan.num_stages == 1
    assert plan.num_micro_batches == 1


def test_no_replica_has_a_row_too_many() -> None:
    """Twelve devices that hold one row at a time take 128 rows in 11 micro-batches, not in 12."""
    profile, devices = _profile(saved=100 * MIB), preset("config-b:12x1").with_memory(500 * MIB)
    plan = make_plan(profile, devices, 128, planner="dp")
    other = make_plan(profile, devices, 128, planner="dp", micro_batch_size=11)
    assert (plan.num_micro_batches, other.num_micro_batches) == (11, 12)
    assert plan.predicted is not None
    assert other.predicted is not None
    assert plan.predicted.step_seconds < 0.95 * other.predicted.step_seconds


def test_plan_carries_its_origin() -> None:
    """Fingerprints, cluster, optimizer and prediction are saved with the plan."""
    profile = _profile()
    plan = make_plan(profile, preset("config-a:1x2"), 8, optimizer="sgd", network_model="paper")
    assert plan.profile_fingerprint == profile.fingerprint()
    assert (plan.optimizer, plan.optimizer_state_factor) == ("sgd", 0.0)
    assert plan.network_model == "paper"
    assert plan.cluster == preset("config-a:1x2")
    assert plan.predicted is not None
    assert any("proportion" in note for note in plan.notes)


def test_same_input_same_plan() -> None:
    """The search is deterministic."""
    rng = random.Random(5)
    profile, cluster = random_profile(rng, 6), random_cluster(rng, 4)
    plans = {make_plan(profile, cluster, 8).to_json() for _ in range(3)}
    assert len(plans) == 1


@pytest.mark.parametrize("name", PLANNERS)
def test_named_planners(name: str) -> None:
    """Every planner gives a plan under its own name, and the search is never behind."""
    rng = random.Random(6)
    profile, cluster = random_profile(rng, 6), random_cluster(rng, 4)
    plan, best = make_plan(profile, cluster, 8, planner=name), make_plan(profile, cluster, 8)
    assert plan.planner == name
    assert plan.predicted is not None
    assert best.predicted is not None
    assert best.predicted.step_seconds <= plan.predicted.step_seconds


def test_straight_takes_fewer_devices_than_there_are() -> None:
    """With fewer layers than devices, the straight pipeline leaves devices idle."""
    plan = make_plan(_profile(layers=2), preset("config-b"), 8, planner="straight")
    assert plan.num_devices == 2


def test_pure_data_parallelism_is_refused_with_its_bytes() -> None:
    """A model too big for one device is pipelined, and the result says why not DP."""
    profile = _profile(parameters=8 * MIB, saved=MIB // 4)
    result = search(profile, preset("config-a:1x2").with_memory("110 MiB"), 8)
    assert result.plan.num_stages == 2
    (refusal,) = [r for r in result.refusals if r.name == "dp"]
    assert refusal.needed.parameters == 32 * MIB
    assert refusal.needed.total > refusal.available == 110 * MIB
    assert "dp refused: needs 129.0 MiB of 110.0 MiB on v100-16gb" in str(refusal)
    assert "cut its layers into more stages" in refusal.remedy


def test_activations_ask_for_a_smaller_micro_batch() -> None:
    """When the micro-batch is what does not fit, the remedy says so."""
    profile = _profile(layers=1, saved=20 * MIB)
    with pytest.raises(MemoryPlanError, match="use a smaller micro-batch") as caught:
        make_plan(profile, preset("config-a:1x1").with_memory("100 MiB"), 8, micro_batch_size=8)
    assert "activations 160.0 MiB" in str(caught.value)
    assert make_plan(profile, preset("config-a:1x1").with_memory("100 MiB"), 8).num_devices == 1


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, "GPipe keeps all 4 micro-batches; take early-backward, recompute stages, cut its"),
        (8, "GPipe keeps the whole batch, however it is cut; take early-backward and smaller ones"),
    ],
)
def test_gpipe_is_told_what_helps_it(size: int, words: str) -> None:
    """All activations stay until the last forward, so smaller micro-batches would not fit either."""
    profile = _profile(layers=4, saved=20 * MIB)
    small = preset("config-a:1x1").with_memory("320 MiB")
    with pytest.raises(MemoryPlanError) as caught:
        make_plan(profile, small, 8, micro_batch_size=size, schedule="gpipe")
    assert words in str(caught.value)
    assert make_plan(profile, small, 8, micro_batch_size=2).num_devices == 1
    again = {"micro_batch_size": size, "recompute": True} if size == 2 else {"micro_batch_size": 1}
    schedule = "gpipe" if size == 2 else "early-backward"
    assert make_plan(profile, small, 8, schedule=schedule, **again).num_devices == 1


def test_a_layer_larger_than_every_device() -> None:
    """Nothing helps a single layer that is larger than a device, and the error says it."""
    with pytest.raises(MemoryPlanError, match="this one layer needs devices with"):
        make_plan(_profile(layers=1, parameters=100 * MIB), preset("config-a").with_memory(MIB), 8)


def test_the_device_that_lacks_memory_is_named() -> None:
    """Of replicas on devices of two sizes a refusal names the one whose bytes it tells."""
    groups = preset("config-a:1x1").machines
    small = groups[0].kind.model_copy(update={"name": "small", "memory": MIB})
    machines = (*groups, groups[0].model_copy(update={"kind": small}))
    cluster = preset("config-a:1x1").model_copy(update={"machines": machines})
    with pytest.raises(MemoryPlanError, match=r"of 1.0 MiB on small"):
        make_plan(_profile(layers=1, saved=20 * MIB), cluster, 2, planner="dp")


def test_activations_of_one_layer_and_one_row_ask_for_a_larger_device() -> None:
    """There is nothing left to cut."""
    with pytest.raises(MemoryPlanError, match="this one layer needs devices with"):
        make_plan(_profile(layers=1, saved=20 * MIB), preset("config-a").with_memory("10 MiB"), 1)


def test_memory_caps_the_warm_up() -> None:
    """K_i is lowered where the activations of S - i micro-batches do not fit."""
    profile = _profile(layers=4, saved=20 * MIB)
    cluster = preset("config-a:1x4").with_memory("60 MiB")
    plan = make_plan(profile, cluster, 16, micro_batch_size=1, planner="straight", warmup="A")
    assert [stage.warmup for stage in plan.stages] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planner": "best"}, 'planner "best" is unknown'),
        ({"optimizer": "lion9"}, 'optimizer "lion9" is unknown'),
        ({"schedule": "zig"}, 'schedule "zig" is unknown'),
        ({"network_model": "ether"}, 'network model "ether" is unknown'),
        ({"micro_batch_size": 9}, "micro-batch size 9 must lie between 1"),
        ({"global_batch_size": 0}, "global batch size 0"),
    ],
)
def test_wrong_arguments(change: dict[str, object], message: str) -> None:
    """Each wrong argument is named with its value."""
    arguments: dict[str, object] = {"global_batch_size": 8} | change
    with pytest.raises(InputError, match=message):
        make_plan(_profile(), preset("config-a"), **arguments)  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.data())
def test_balanced_bounds(costs: list[float], data: st.DataObject) -> None:
    """No part is empty, and no cut gives a smaller largest part."""
    parts = data.draw(st.integers(1, len(costs)))
    bounds = balanced_bounds(costs, parts)
    assert len(bounds) == parts + 1
    assert all(a < b for a, b in itertools.pairwise(bounds))

    def worst(cuts: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(cuts))

    best = min(worst(tuple(map(int, row))) for row in all_bounds(len(costs), parts))
    assert worst(bounds) <= best + 1e-9
