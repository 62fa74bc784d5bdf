"""Devices of different speed: rows in proportion to it, where that is shorter."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.costs import proportional_rows, stage_memory
from dapple.errors import MemoryPlanError
from dapple.planner import SearchOptions, make_plan, search
from dapple.planner.certificate import lower_bound
from dapple.planner.exact import all_bounds, device_sequences
from dapple.planner.explain import explain
from dapple.planner.layout import Layout
from dapple.planner.mixed import speed_units
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.whole_rows import least_times
from dapple.records import LayerProfile, ModelProfile, TensorProfile
from tests.planner.instances import random_profile
from tests.planner.strategies import MIB, clusters, profiles
from tests.planner.test_robustness import check

SPEEDS = st.lists(st.sampled_from([0.25, 0.3, 1.0, 1.0, 2.5]), min_size=1, max_size=4)


def mixed(*speeds: float, memory: int = 2**34, bandwidth: float = 1e12) -> Cluster:
    """One machine of one device for each speed."""
    groups = tuple(
        Machines(
            devices=1,
            kind=DeviceKind(name=f"d{number}", memory=memory, speed=speed),
            inside=Link(bandwidth=bandwidth),
            outside=Link(bandwidth=bandwidth),
        )
        for number, speed in enumerate(speeds)
    )
    return Cluster(name="mixed", machines=groups)


def chain(layers: int, seconds: float = 1e-3, parameters: int = 4, saved: int = 4) -> ModelProfile:
    """Equal layers whose time is in proportion to the rows."""
    return ModelProfile(
        model="chain",
        device="d",
        batch_sizes=(1,),
        layers=tuple(
            LayerProfile(
                name=f"l{number}",
                forward_seconds=(seconds,),
                backward_seconds=(2 * seconds,),
                parameter_bytes=parameters,
                saved_bytes=(saved,),
            )
            for number in range(layers)
        ),
        tensors=tuple(
            TensorProfile(name=f"t{n}", producer=n, consumers=(n + 1,), bytes_per_sample=4.0)
            for n in range(layers - 1)
        ),
    )


@given(st.integers(1, 12), SPEEDS)
def test_the_last_replica_is_done_as_soon_as_whole_rows_allow(
    rows: int, speeds: list[float]
) -> None:
    """Of all ways to give out the rows none ends sooner; no exact share is rounded up before."""
    found = proportional_rows(rows, speeds)
    assert sum(found) == rows
    exact = [rows * v / sum(speeds) for v in speeds]
    assert all(n > share - 1 - 1e-9 for n, share in zip(found, exact, strict=True))
    others = itertools.product(range(rows + 1), repeat=len(speeds))
    best = min(
        max(n / v for n, v in zip(other, speeds, strict=True))
        for other in others
        if sum(other) == rows
    )
    assert max(n / v for n, v in zip(found, speeds, strict=True)) == pytest.approx(best)


@given(SPEEDS)
def test_units_of_speed_are_never_slower_than_the_devices(speeds: list[float]) -> None:
    """And least so: within an eighth of the fastest device for each."""
    units = speed_units(tuple(speeds))
    for speed, count in zip(speeds, units.of_device, strict=True):
        assert speed <= count * units.size * (1 + 1e-9)
        assert sum(units.of_device) * units.size <= sum(speeds) + len(speeds) * max(speeds) / 8


@given(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=4), st.integers(1, 7))
def test_whole_rows_take_at_least_so_long(units: list[int], rows: int) -> None:
    """By the units of a stage: never more than any devices with so many need, and most often that."""
    found = least_times(Counter(units), rows)
    for together in range(sum(units) + 1):
        best = min(
            (
                max(n / q for n, q in zip(split, stage, strict=True))
                for count in range(1, len(units) + 1)
                for stage in itertools.combinations(units, count)
                if sum(stage) <= together
                for split in itertools.product(range(rows + 1), repeat=count)
                if sum(split) == rows
            ),
            default=float("inf"),
        )
        assert found[together] <= best * (1 + 1e-12)
        if best <= 24 / max(units):
            assert found[together] == pytest.approx(best)


def test_one_stage_on_two_devices_takes_their_common_speed() -> None:
    """Speeds 3 and 1: three quarters of the rows; with even ones the slow device is best idle."""
    profile, where = chain(1), mixed(3.0, 1.0)
    plan = make_plan(profile, where, 12)
    assert plan.stages[0].rows == (9.0, 3.0)
    even = search(profile, where, 12, options=SearchOptions(proportional=False)).plan
    assert even.stages[0].rows is None
    assert plan.predicted is not None
    assert even.predicted is not None
    assert even.predicted.step_seconds == pytest.approx(12 * 3e-3 / 3, rel=1e-3)
    assert plan.predicted.step_seconds == pytest.approx(12 * 3e-3 / 4, rel=1e-3)
    assert plan.predicted.lower_bound_seconds == pytest.approx(12 * 3e-3 / 4, rel=0.006)


def test_a_device_without_rows_is_left_out() -> None:
    """Two rows for two fast devices; the third, ten times slower, has none and holds nothing."""
    problem = Problem(chain(2), mixed(1.0, 1.0, 0.1), 2, proportional=True)
    (stage,) = problem.split_stages(Layout((0, 2), ((0, 1, 2),), 1))
    assert (stage.devices, stage.rows) == ((0, 1), None)


def test_memory_of_the_device_with_most_rows_counts() -> None:
    """Even rows fit, rows in proportion do not: the plan keeps to what fits."""
    profile = chain(1, saved=MIB)
    for mebibytes, rows in ((9, (8.0, 4.0)), (7, None)):
        where = mixed(2.0, 1.0, memory=mebibytes * MIB)
        plan = make_plan(profile, where, 12, micro_batch_size=12)
        assert plan.stages[0].rows == rows


@settings(max_examples=15, deadline=None)
@given(profiles(max_layers=6), clusters(max_devices=5), st.sampled_from([1, 5, 12]), st.booleans())
def test_never_longer_than_with_even_rows(
    profile: ModelProfile, where: Cluster, batch: int, exact: bool
) -> None:
    """Whatever the input; and the plan is sound and fits every one of its devices."""
    options = SearchOptions(exact=exact)
    even_only = SearchOptions(exact=exact, certificate=False, proportional=False)
    try:
        even = search(profile, where, batch, options=even_only).plan
    except MemoryPlanError:
        even = None
    try:
        plan = search(profile, where, batch, options=options).plan
    except MemoryPlanError:
        assert even is None
        return
    step = check(plan, profile)
    if even is not None:
        assert step <= check(even, profile) * (1 + 1e-9)
    problem, kinds = Problem(profile, where, batch), where.kind_of_device()
    for number, stage in enumerate(plan.stages):
        for replica, device in enumerate(stage.devices):
            memory = stage_memory(
                problem.model,
                plan.stages,
                number,
                plan.micro_batch_size,
                stage.warmup,
                optimizer_state_factor=plan.optimizer_state_factor,
                replica=replica,
            )
            assert memory is None or memory.total <= kinds[device].memory


@pytest.mark.parametrize("seed", range(6))
def test_bound_and_plan_beside_all_plans(seed: int) -> None:
    """On three devices of up to three speeds, with even and proportional rows in every stage."""
    rng = random.Random(seed)
    profile = random_profile(rng, 4)
    where = mixed(*(rng.choice((0.25, 0.4, 1.0, 1.7)) for _ in range(3)), bandwidth=3e8)
    kinds = [Problem(profile, where, 11, micro_batch_size=3, proportional=p) for p in (0, 1)]
    count = kinds[0].micro_batch_counts[0]
    best = float("inf")
    for stages in (1, 2, 3):
        sets = device_sequences(where.machine_sizes(), stages)
        for devices, bounds in itertools.product(sets, all_bounds(4, stages).tolist()):
            parts = [p.fit(Layout(tuple(bounds), devices, count), "") for p in kinds]
            ways = [part for part in parts if not isinstance(part, Refusal)]
            # Every stage by itself has even rows, or those in proportion.
            for chosen in itertools.product(*zip(*ways, strict=True)):
                best = min(best, kinds[0].step_seconds(chosen, count))
    bound = lower_bound(kinds[0], best, count)
    assert 0.5 * best < bound <= best * (1 + 1e-9)
    plan = make_plan(profile, where, 11, micro_batch_size=3, warmup="A")
    assert plan.predicted is not None
    assert plan.predicted.step_seconds <= best * 1.01


def test_explained_with_alternatives_of_the_same_kind() -> None:
    """One stage more has rows in proportion too, where its devices differ."""
    profile, where = chain(6, parameters=64), mixed(1.0, 0.5, 0.5, 0.5)
    result = search(profile, where, 16)
    assert any(stage.rows for stage in result.plan.stages)
    explained = explain(result, profile, Problem(profile, where, 16))
    steps = [other.step_seconds for other in explained.alternatives if other.step_seconds]
    assert min(steps) >= explained.step_seconds * (1 - 1e-9)
