"""Odd models on odd clusters: a plan that holds, no worse than the simple ones, the same everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.errors import InputError, MemoryPlanError, PlanError
from dapple.planner import SearchOptions, make_plan, search
from dapple.records import LayerProfile, ModelProfile, Plan, TensorProfile, load_record
from dapple.schedule import check_schedule, make_schedule
from dapple.simulator import simulate
from tests.planner.strategies import MIB, clusters, profiles

GIB = 2**30


def model(
    seconds: Sequence[float],
    *,
    parameters: int = MIB,
    saved: int | None = MIB,
    crossing: Sequence[float] | float = 1e5,
) -> ModelProfile:
    """A chain; backward takes twice the forward, and `crossing` bytes a row join neighbours."""
    layers = tuple(
        LayerProfile(
            name=f"l{number}",
            forward_seconds=(s, 8 * s),
            backward_seconds=(2 * s, 16 * s),
            parameter_bytes=parameters,
            saved_bytes=None if saved is None else (saved, 8 * saved),
        )
        for number, s in enumerate(seconds)
    )
    count = len(layers) - 1
    sizes = [crossing] * count if isinstance(crossing, float) else crossing
    tensors = tuple(
        TensorProfile(name=f"t{n}", producer=n, consumers=(n + 1,), bytes_per_sample=sizes[n])
        for n in range(count)
    )
    return ModelProfile(model="odd", device="d", batch_sizes=(1, 8), layers=layers, tensors=tensors)


def cluster(*sizes: int, speeds: Sequence[float] | None = None, memory: int = 16 * GIB) -> Cluster:
    """Machines of these sizes, each of one speed, 10 times slower between than inside."""
    groups = tuple(
        Machines(
            devices=size,
            kind=DeviceKind(name=f"d{number}", memory=memory, speed=speed),
            inside=Link(bandwidth=1e10, latency=5e-6),
            outside=Link(bandwidth=1e9, latency=3e-5),
        )
        for number, (size, speed) in enumerate(
            zip(sizes, speeds or [1.0] * len(sizes), strict=True)
        )
    )
    return Cluster(name="odd", machines=groups)


def check(plan: Plan, profile: ModelProfile) -> float:
    """The plan is sound as a record, as a schedule and in the simulator; its step in seconds."""
    again = Plan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert plan.stages[-1].stop == profile.num_layers
    warmup = [stage.warmup for stage in plan.stages]
    assert warmup == sorted(warmup, reverse=True)
    check_schedule(make_schedule(plan.schedule, plan.num_micro_batches, warmup), warmup)
    assert plan.predicted is not None
    kinds = plan.cluster.kind_of_device()
    for stage, predicted in zip(plan.stages, plan.predicted.stages, strict=True):
        least = min(kinds[device].memory for device in stage.devices)
        if predicted.peak_bytes is not None and len({k.memory for k in kinds}) == 1:
            assert predicted.peak_bytes <= least
    step = simulate(plan, profile, spans=False).step_seconds
    assert plan.predicted.step_seconds == pytest.approx(step, rel=1e-9)
    if plan.predicted.lower_bound_seconds is not None:
        assert plan.predicted.lower_bound_seconds <= step * (1 + 1e-9)
    return step


def check_against_simple_plans(
    profile: ModelProfile, where: Cluster, batch: int, **options: Any
) -> Plan:
    """Plan, check, and compare with pure data parallelism and the straight pipeline."""
    plan = make_plan(profile, where, batch, **options)
    step = check(plan, profile)
    for name in ("dp", "straight"):
        try:
            other = make_plan(profile, where, batch, planner=name, **options)
        except MemoryPlanError:
            continue
        assert step <= check(other, profile) * (1 + 1e-9), name
    return plan


def test_two_thousand_layers() -> None:
    """A model taken apart into its operations is planned and certified in seconds."""
    seconds = [1e-5 * (1 + number * 7919 % 13) for number in range(2000)]
    profile = model(seconds, saved=MIB // 8)
    begun = time.process_time()
    result = search(profile, cluster(8), 64)
    assert time.process_time() - begun < 12
    step = check(result.plan, profile)
    assert result.plan.predicted is not None
    assert result.plan.predicted.lower_bound_seconds is not None
    assert result.plan.predicted.lower_bound_seconds > 0.9 * step
    for name in ("dp", "straight"):
        if name in result.candidates:
            assert step <= result.candidates[name].step_seconds * (1 + 1e-9), name


@pytest.mark.parametrize(("layers", "sizes", "batch"), [(13, (7,), 31), (7, (5, 2), 17)])
def test_prime_counts(layers: int, sizes: tuple[int, ...], batch: int) -> None:
    """Nothing has to divide anything."""
    profile = model([1e-3 * (1 + n % 3) for n in range(layers)])
    check_against_simple_plans(profile, cluster(*sizes), batch)


def test_free_layers() -> None:
    """Layers without cost, at the ends and between, are stages of no one's."""
    profile = model([0.0, 0.0, 1e-3, 0.0, 0.0, 2e-3, 0.0])
    check_against_simple_plans(profile, cluster(2, 2), 8)


def test_a_model_without_any_cost() -> None:
    """A step of no time at all is one stage on one device."""
    profile = model([0.0] * 4, parameters=0, saved=0, crossing=0.0)
    plan = check_against_simple_plans(profile, cluster(4), 8)
    assert plan.num_stages == 1
    assert plan.stages[0].replicas == 1


def test_a_single_huge_cut_is_not_cut() -> None:
    """Where one tensor dwarfs all else between machines, it stays inside a machine."""
    sizes = [1e4] * 3 + [1e10] + [1e4] * 3
    profile = model([1e-3] * 8, parameters=200 * MIB, crossing=sizes)
    plan = check_against_simple_plans(profile, cluster(1, 1, 1, 1), 16)
    assert 4 not in {stage.stop for stage in plan.stages}


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_fewer_layers_than_devices(layers: int) -> None:
    """Stages are replicated, or devices stay idle."""
    check_against_simple_plans(model([2e-3] * layers), cluster(4, 4), 24)


def test_one_row() -> None:
    """A batch of one row is one micro-batch on one device of each stage."""
    plan = check_against_simple_plans(model([1e-3] * 6), cluster(4, 4), 1)
    assert plan.num_micro_batches == 1
    assert all(stage.replicas == 1 for stage in plan.stages)


@pytest.mark.parametrize("sizes", [(1, 8), (8, 1), (1, 8, 1, 2)])
def test_machines_of_one_device_beside_machines_of_eight(sizes: tuple[int, ...]) -> None:
    """Machines need not be alike."""
    profile = model([1e-3 * (1 + n % 4) for n in range(12)], parameters=20 * MIB)
    check_against_simple_plans(profile, cluster(*sizes), 32)


def test_devices_of_different_speed() -> None:
    """A plan may leave slow devices idle, and is never held up by them more than it must."""
    profile = model([1e-3] * 10)
    plan = check_against_simple_plans(profile, cluster(2, 2, speeds=(1.0, 0.01)), 16)
    alone = make_plan(profile, cluster(2), 16)
    assert plan.predicted is not None
    assert alone.predicted is not None
    assert plan.predicted.step_seconds <= alone.predicted.step_seconds * (1 + 1e-9)


def test_an_uneven_model_beats_the_even_split() -> None:
    """One layer takes as long as the seven others: cut beside it, not in the middle."""
    profile = model([1e-3] * 7 + [7e-3], parameters=256 * MIB)
    plan = make_plan(profile, cluster(2), 16)
    even = make_plan(profile, cluster(2), 16, planner="straight")
    stages = [
        stage.model_copy(update={"start": start, "stop": start + 4})
        for stage, start in zip(even.stages, (0, 4), strict=True)
    ]
    even = even.model_copy(update={"stages": tuple(stages)})
    assert check(plan, profile) < 0.8 * simulate(even, profile, spans=False).step_seconds


def test_one_layer_on_one_device() -> None:
    """The least there is to plan."""
    plan = check_against_simple_plans(model([1e-3]), cluster(1), 5)
    assert (plan.num_stages, plan.stages[0].devices) == (1, (0,))


def test_a_layer_larger_than_any_device_is_refused_in_bytes() -> None:
    """Not even alone on a device: the refusal says what lacks."""
    with pytest.raises(MemoryPlanError, match="GiB"):
        make_plan(model([1e-3] * 3, parameters=20 * GIB), cluster(8), 8)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    profiles(max_layers=9),
    clusters(max_devices=9),
    st.sampled_from([1, 2, 7, 12, 31]),
    st.sampled_from([None, "A", "B", "tuned"]),
    st.booleans(),
)
def test_the_general_search(
    profile: ModelProfile, where: Cluster, batch: int, warmup: str | None, recompute: bool
) -> None:
    """Without the exact mode: a sound plan, or a word on what is wrong with the input."""
    options = SearchOptions(exact=False)
    try:
        found = search(profile, where, batch, warmup=warmup, recompute=recompute, options=options)
    except (PlanError, InputError):
        return
    check(found.plan, profile)


@pytest.mark.parametrize("first", [0, 1])
def test_a_model_goes_where_the_memory_is(first: int) -> None:
    """A layer that only one machine can hold is planned there, whichever machine is the first."""
    groups = [cluster(1, memory=size).machines[0] for size in (GIB, 80 * GIB)]
    where = Cluster(name="uneven", machines=(groups[first], groups[1 - first]))
    plan = make_plan(model([1e-3], parameters=4 * GIB), where, 8)
    check(plan, model([1e-3], parameters=4 * GIB))
    assert plan.stages[0].devices == (1 - first,)


def test_the_general_search_alone_refuses_as_well() -> None:
    """With the baselines left out too, a model that fits nowhere is a MemoryPlanError."""
    options = SearchOptions(baselines=False, exact=False)
    with pytest.raises(MemoryPlanError):
        search(model([1e-3] * 3, parameters=20 * GIB), cluster(4), 8, options=options)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(profiles(max_layers=7), clusters(max_devices=7), st.sampled_from([1, 5, 13, 24]))
def test_never_slower_than_simple_plans(profile: ModelProfile, where: Cluster, batch: int) -> None:
    """Whatever the input, data parallelism and the straight pipeline are no shorter."""
    try:
        check_against_simple_plans(profile, where, batch)
    except MemoryPlanError:
        for name in ("dp", "straight"):
            with pytest.raises(MemoryPlanError):
                make_plan(profile, where, batch, planner=name)


_SCRIPT = """
import sys
from dapple.cluster import parse_cluster
from dapple.planner import make_plan
from dapple.records import ModelProfile, load_record
profile = load_record(ModelProfile, sys.argv[1])
with open(sys.argv[2], encoding="utf-8") as file:
    where = parse_cluster(file.read(), sys.argv[2])
make_plan(profile, where, 48).save(sys.argv[3])
"""


def test_the_same_answer_in_every_process(tmp_path: Any) -> None:
    """Order of sets and seeds of hashes play no part: two processes write the same plan."""
    profile = model([1e-3 * (1 + n * 5 % 7) for n in range(18)], parameters=30 * MIB)
    profile.save(tmp_path / "profile.json")
    (tmp_path / "cluster.toml").write_text(
        cluster(4, 2, 2, speeds=(1.0, 0.5, 1.0)).to_toml(), encoding="utf-8"
    )
    plans = []
    for seed in ("1", "4242"):
        out = tmp_path / f"plan-{seed}.json"
        files = [str(tmp_path / "profile.json"), str(tmp_path / "cluster.toml"), str(out)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", _SCRIPT, *files], check=True, env=environment)
        plans.append(json.loads(out.read_text(encoding="utf-8")))
    assert plans[0] == plans[1]
    check(load_record(Plan, tmp_path / "plan-1.json"), profile)
