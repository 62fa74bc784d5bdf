"""The lower bound holds for every plan, and is close to the best one."""

from __future__ import annotations

import random
import statistics
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, DeviceKind, Link, Machines, preset
from dapple.costs import split_rows
from dapple.planner import make_plan
from dapple.planner.certificate import lower_bound
from dapple.planner.demand import Demand
from dapple.planner.exact import all_bounds, device_sequences
from dapple.planner.layout import Layout
from dapple.planner.mixed import all_shares, ranges
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.relaxed import meets, relax
from dapple.planner.shares import row_ranges
from dapple.records import (
    LayerProfile,
    ModelProfile,
    StagePlan,
    TensorProfile,
    TiedGroup,
    TiedMember,
)
from dapple.records.shipped import shipped_profile
from tests.planner.instances import brute_force, random_cluster, random_profile
from tests.planner.strategies import clusters, profiles


def _allowed_seconds(problem: Problem, layout: Layout) -> float | None:
    """The step of a plan, which both forms of the relaxed costs of its M must allow; None: too big."""
    count, fitting = layout.micro_batches, problem.fit(layout, "test")
    if isinstance(fitting, Refusal):
        return None
    seconds = problem.step_seconds(fitting, count)
    low, high = next(pair for pair in ranges(problem) if pair[0] <= count <= pair[1])
    found = all_shares(problem, low, high)
    assert meets(relax(problem, found), seconds)
    assert Demand.of(problem, found).meets(seconds)
    return seconds


@settings(max_examples=100, deadline=None)
@given(profiles(), clusters(), st.integers(1, 13), st.data())
def test_no_plan_is_below_the_bound(
    profile: ModelProfile, cluster: Cluster, batch: int, data: st.DataObject
) -> None:
    """The relaxed costs of its M, in both forms, allow the step of any plan, rows split either way."""
    problem = Problem(profile, cluster, batch, proportional=data.draw(st.booleans()))
    count = data.draw(st.integers(1, batch), label="M")
    stages = data.draw(st.integers(1, min(problem.num_layers, problem.num_devices)))
    devices = data.draw(st.sampled_from(list(device_sequences(problem.machine_sizes, stages))))
    bounds = data.draw(st.sampled_from(all_bounds(problem.num_layers, stages).tolist()))
    layout = Layout(tuple(bounds), devices, count, data.draw(st.sampled_from("AB")))
    seconds = _allowed_seconds(problem, layout)
    if seconds is not None:
        assert lower_bound(problem, 2 * seconds, count) <= seconds * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10), st.integers(1, 6), st.integers(1, 16), st.data())
def test_no_chain_is_below_the_bound_however_short_of_memory(
    seed: int, layers: int, devices: int, batch: int, data: st.DataObject
) -> None:
    """Where every stage waits for the one before it and memory is known, down to what just fits."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, layers), random_cluster(rng, devices)
    count = data.draw(st.integers(1, batch), label="M")
    stages = data.draw(st.integers(1, min(layers, devices)))
    sets = data.draw(st.sampled_from(list(device_sequences(cluster.machine_sizes(), stages))))
    bounds = data.draw(st.sampled_from(all_bounds(layers, stages).tolist()))
    layout = Layout(tuple(bounds), sets, count, data.draw(st.sampled_from("AB")))
    for memory in (2**24, 2**26, 2**28, 2**30, 2**34):
        _allowed_seconds(Problem(profile, cluster.with_memory(memory), batch), layout)


@pytest.mark.parametrize(("model", "batch"), [("resnet-50", 2048), ("vgg-19", 2048)])
def test_real_models_are_not_below_their_bound(model: str, batch: int) -> None:
    """Also where no step is known that it may not exceed."""
    profile = shipped_profile(model, "v100-16gb")
    assert profile is not None
    cluster = preset("config-a")
    plan = make_plan(profile, cluster, batch)
    assert plan.predicted is not None
    step, problem = plan.predicted.step_seconds, Problem(profile, cluster, batch)
    assert lower_bound(problem, 3 * step, plan.num_micro_batches) <= step


@settings(max_examples=40, deadline=None)
@given(profiles(max_layers=4), clusters(max_devices=3), st.integers(1, 7))
def test_bound_of_all_micro_batch_counts(
    profile: ModelProfile, cluster: Cluster, batch: int
) -> None:
    """It is the least bound over every M."""
    problem = Problem(profile, cluster, batch)
    layout = Layout((0, problem.num_layers), ((0,),), 1)
    seconds = problem.step_seconds(layout.stages(), 1)
    whole = lower_bound(problem, seconds, 1)
    for count in range(1, batch + 1):
        size = -(-batch // count)
        if -(-batch // size) == count:
            one = lower_bound(
                Problem(profile, cluster, batch, micro_batch_size=size), seconds, count
            )
            assert whole <= one * 1.006 + 1e-12


@pytest.mark.parametrize("batch", [1, 7, 48, 100, 97])
def test_ranges_hold_every_number_of_micro_batches(batch: int) -> None:
    """Each M once, with micro-batches of the same one or two sizes."""
    found = row_ranges(batch)
    assert [m for low, high in found for m in range(low, high + 1)] == list(range(1, batch + 1))
    for low, high in found:
        sizes = {(batch // m, -(-batch // m)) for m in range(low, high + 1)}
        assert len(sizes) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.data())
def test_shares_are_those_of_the_first_replica(
    batch: int, devices: int, data: st.DataObject
) -> None:
    """For every M of a range and every number of replicas: its rows, and no more than its work."""
    profile = random_profile(random.Random(1), 2)
    cluster = Cluster(name="flat", machines=random_cluster(random.Random(1), devices).machines)
    problem = Problem(profile, cluster, batch)
    low, high = data.draw(st.sampled_from(row_ranges(batch)))
    found = all_shares(problem, low, high)
    count, replicas = data.draw(st.integers(low, high)), data.draw(st.integers(1, devices))
    at = int(np.searchsorted(found.widths, replicas, side="right")) - 1
    assert found.widths[at] <= replicas <= found.most_widths[at]
    table = problem.tables(count).stage(tuple(range(replicas)))
    rows = [-(-n // replicas) for n in split_rows(batch, count)]
    assert (found.first_rows[at], found.last_rows[at]) == (rows[0], rows[-1])
    work = np.diff(table.work)
    assert (found.work[at] <= work * (1 + 1e-9)).all()
    if low == high:
        assert found.work[at] == pytest.approx(work)


def test_close_to_the_optimum_on_brute_forced_instances() -> None:
    """On average within 5 % of the best contiguous plan."""
    rng = random.Random(9)
    ratios = []
    for _ in range(25):
        profile = random_profile(rng, rng.randint(2, 8))
        cluster = random_cluster(rng, rng.randint(2, 5))
        best = brute_force(profile, cluster, 12, 2)
        assert best is not None
        bound = lower_bound(Problem(profile, cluster, 12, micro_batch_size=2), best[0], 6)
        assert bound <= best[0]
        ratios.append(bound / best[0])
    assert statistics.mean(ratios) >= 0.95


def test_a_stage_that_just_fits_is_allowed() -> None:
    """Parameters and gradients that fill the device to the last byte, and nothing is kept."""
    layer = LayerProfile(
        name="l",
        forward_seconds=(1.0,),
        backward_seconds=(2.0,),
        parameter_bytes=2**30,
        saved_bytes=(0,),
    )
    profile = ModelProfile(model="m", device="d", batch_sizes=(1,), layers=(layer,))
    machines = Machines(
        devices=1, kind=DeviceKind(name="d", memory=2**31), inside=Link(bandwidth=1e9)
    )
    problem = Problem(
        profile, Cluster(name="c", machines=(machines,)), 1, micro_batch_size=1, optimizer="sgd"
    )
    found = all_shares(problem, 1, 1)
    for meets_target in (Demand.of(problem, found).meets, partial(meets, relax(problem, found))):
        assert meets_target(3.0)
        assert not meets_target(2.9)


def test_the_plan_carries_its_bound() -> None:
    """A plan says how far it can be from the best."""
    rng = random.Random(3)
    profile, cluster = random_profile(rng, 6), random_cluster(rng, 4)
    predicted = make_plan(profile, cluster, 16).predicted
    assert predicted is not None
    assert predicted.lower_bound_seconds is not None
    assert 0.5 * predicted.step_seconds < predicted.lower_bound_seconds <= predicted.step_seconds


def test_the_best_pair_of_machines_need_not_be_neighbours() -> None:
    """Of slow and fast machines in turn, a pipeline on the fast ones is not below the bound."""
    groups = tuple(
        Machines(
            devices=1,
            kind=DeviceKind(name="d", memory=80 * 2**30),
            inside=Link(bandwidth=1e11),
            outside=Link(bandwidth=bandwidth, latency=1e6 / bandwidth),
        )
        for bandwidth in (1e7, 1e10, 1e7, 1e10)
    )
    cluster = Cluster(name="in turn", machines=groups)
    layers = tuple(
        LayerProfile(
            name=f"l{n}",
            forward_seconds=(0.01,),
            backward_seconds=(0.02,),
            parameter_bytes=2**31,
        )
        for n in range(2)
    )
    tensor = TensorProfile(name="t", producer=0, consumers=(1,), bytes_per_sample=1e6)
    profile = ModelProfile(
        model="m", device="d", batch_sizes=(1,), layers=layers, tensors=(tensor,)
    )
    problem = Problem(profile, cluster, 16)
    stages = tuple(
        StagePlan(start=n, stop=n + 1, devices=(2 * n + 1,), warmup=2 - n) for n in range(2)
    )
    seconds = problem.step_seconds(stages, 16)
    assert lower_bound(problem, 2 * seconds, 16) <= seconds


def test_memory_for_one_micro_batch_costs_a_round_trip_each() -> None:
    """Two stages that hold one micro-batch at a time take turns, and both forms of the bound know."""
    layers = tuple(
        LayerProfile(
            name=f"l{n}",
            forward_seconds=(1.0,),
            backward_seconds=(2.0,),
            parameter_bytes=0,
            saved_bytes=(1000,),
        )
        for n in range(2)
    )
    profile = ModelProfile(model="m", device="d", batch_sizes=(1,), layers=layers)
    machines = Machines(
        devices=2, kind=DeviceKind(name="d", memory=1500), inside=Link(bandwidth=1e9)
    )
    cluster = Cluster(name="c", machines=(machines,))
    problem = Problem(profile, cluster, 4, micro_batch_size=1)
    found = all_shares(problem, 4, 4)
    for meets_target in (Demand.of(problem, found).meets, partial(meets, relax(problem, found))):
        assert meets_target(24.0)
        assert not meets_target(23.9)
    plan = make_plan(profile, cluster, 4, micro_batch_size=1)
    assert plan.predicted is not None
    assert plan.predicted.step_seconds == pytest.approx(24.0)
    # With memory for two, the first forward of the second micro-batch runs beside the first's rest.
    roomy = Problem(profile, cluster.with_memory(2500), 4, micro_batch_size=1)
    assert meets(relax(roomy, all_shares(roomy, 4, 4)), 15.0)


def _one_kind(devices: int, memory: int) -> Cluster:
    kind = DeviceKind(name="d", memory=memory)
    machines = Machines(devices=devices, kind=kind, inside=Link(bandwidth=1e9))
    return Cluster(name="c", machines=(machines,))


def _layers(count: int, parameter_bytes: int, **costs: tuple[float, ...]) -> ModelProfile:
    sizes = len(costs["forward_seconds"])
    layers = tuple(
        LayerProfile.model_validate({"name": f"l{n}", "parameter_bytes": parameter_bytes, **costs})
        for n in range(count)
    )
    return ModelProfile(
        model="m", device="d", batch_sizes=tuple(range(1, sizes + 1)), layers=layers
    )


def test_a_bound_of_nothing_is_found() -> None:
    """Layers that cost nothing, too big for one device, with tied parameters to add up: the bound is 0."""
    profile = _layers(3, 2**30, forward_seconds=(0.0,), backward_seconds=(0.0,), saved_bytes=(0,))
    members = tuple(TiedMember(layer=n, parameter="w") for n in (0, 2))
    profile = profile.model_copy(
        update={"tied": (TiedGroup(parameter_bytes=2**30, members=members),)}
    )
    plan = make_plan(profile, _one_kind(3, 2 * 2**30 + 2**24), 4, optimizer="sgd")
    assert plan.predicted is not None
    assert plan.predicted.step_seconds > 0
    assert plan.predicted.lower_bound_seconds == 0


def test_recomputing_all_forwards_holds_one_micro_batch() -> None:
    """GPipe keeps M micro-batches' activations, unless its stages make them again."""
    costs = {"forward_seconds": (1.0,), "backward_seconds": (2.0,), "saved_bytes": (1000,)}
    profile, cluster = _layers(12, 0, **costs), _one_kind(2, 20000)
    given = {"micro_batch_size": 1, "schedule": "gpipe", "recompute": True}
    plan = make_plan(profile, cluster, 8, **given)  # type: ignore[arg-type]
    assert plan.predicted is not None
    step, problem = plan.predicted.step_seconds, Problem(profile, cluster, 8, **given)  # type: ignore[arg-type]
    assert lower_bound(problem, 3 * step, 8) <= step


def test_fewer_rows_may_take_longer() -> None:
    """A round trip is that of the micro-batch that is quicker, though it be the larger one."""
    costs = {"forward_seconds": (2.0, 1.0), "backward_seconds": (4.0, 2.0)}
    profile, cluster = _layers(1, 0, **costs, saved_bytes=(1000, 2000)), _one_kind(1, 2500)
    plan = make_plan(profile, cluster, 3, micro_batch_size=2, optimizer="sgd")
    assert plan.predicted is not None
    assert plan.predicted.step_seconds == pytest.approx(9.0)
    problem = Problem(profile, cluster, 3, micro_batch_size=2, optimizer="sgd")
    assert lower_bound(problem, 27.0, 2) <= 9.0
