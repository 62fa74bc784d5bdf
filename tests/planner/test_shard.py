"""Optimizer state shared out among replicas: where memory is short, and where it is faster."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.errors import MemoryPlanError
from dapple.planner import SearchOptions, search
from dapple.planner.bounds import layout_bounds
from dapple.planner.demand import Demand
from dapple.planner.exact import all_bounds, device_sequences
from dapple.planner.layout import Layout
from dapple.planner.mixed import all_shares, ranges
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.relaxed import meets, relax
from dapple.records import LayerProfile, ModelProfile, Plan
from tests.planner.strategies import clusters, profiles

MIB = 2**20


def _one_layer(update: float = 0.5) -> ModelProfile:
    """One layer of 10 MiB in two parameters, which no pipeline can take apart."""
    layer = LayerProfile(
        name="l",
        forward_seconds=(1.0,),
        backward_seconds=(2.0,),
        parameter_bytes=10 * MIB,
        parameter_sizes=(5 * MIB, 5 * MIB),
        saved_bytes=(MIB,),
        optimizer_seconds=update,
    )
    return ModelProfile(model="one", device="d", batch_sizes=(1,), layers=(layer,))


def _pair(memory: int) -> Cluster:
    kind = DeviceKind(name="small", memory=memory)
    machine = Machines(devices=2, kind=kind, inside=Link(bandwidth=1e9))
    return Cluster(name="pair", machines=(machine,))


def _peak(plan: Plan) -> int:
    assert plan.predicted is not None
    peaks = [stage.peak_bytes for stage in plan.predicted.stages]
    assert all(peak is not None for peak in peaks)
    return max(peak or 0 for peak in peaks)


def test_state_is_shared_where_nothing_fits_otherwise() -> None:
    """4 x 10 MiB do not fit 36 MiB; two replicas need 2 x 10 + 10 each, one activation beside."""
    profile, cluster = _one_layer(), _pair(36 * MIB)
    with pytest.raises(MemoryPlanError):
        search(profile, cluster, 2)
    plan = search(profile, cluster, 2, shard=True).plan
    (stage,) = plan.stages
    assert (stage.shard, stage.replicas) == ("optimizer", 2)
    assert _peak(plan) <= 36 * MIB


def test_state_stays_whole_where_sharing_is_no_gain() -> None:
    """What binds no memory is not shared out if half an AllReduce (5 ms) is more than half the update."""
    profile, cluster = _one_layer(update=0.01), _pair(2**30)
    plan, other = (search(profile, cluster, 2, shard=shard).plan for shard in (True, False))
    assert [stage.shard for stage in plan.stages] == ["none"]
    assert plan.stages == other.stages


def test_an_update_is_shared_where_that_is_shorter_though_memory_is_enough() -> None:
    """Half an AllReduce (5.2 ms) for half of 12 ms of update, to the microsecond."""
    profile, cluster = _one_layer(update=0.012), _pair(2**30)
    plan, other = (search(profile, cluster, 2, shard=shard).plan for shard in (True, False))
    assert [stage.shard for stage in plan.stages] == ["optimizer"]
    assert plan.predicted is not None
    assert other.predicted is not None
    saved = other.predicted.step_seconds - plan.predicted.step_seconds
    assert saved == pytest.approx(0.006 - 0.5 * 10 * MIB / 1e9, abs=1e-6)


def test_replicas_that_share_their_update_beat_the_pipeline_that_whole_updates_call_for() -> None:
    """The search looks for them, it does not only share the updates of the plan found without."""
    layers = [_one_layer(update=5.0).layers[0].model_copy(update={"name": f"l{n}"}) for n in (0, 1)]
    profile = _one_layer().model_copy(update={"layers": tuple(layers)})
    options = SearchOptions(exact=False, baselines=False)
    plans = [
        search(profile, _pair(2**30), 2, shard=shard, options=options).plan
        for shard in (False, True)
    ]
    assert [[stage.replicas for stage in plan.stages] for plan in plans] == [[1, 1], [2]]
    steps = [plan.predicted.step_seconds for plan in plans if plan.predicted is not None]
    assert steps[1] < steps[0]


def test_sharing_comes_before_recomputing() -> None:
    """Where either suffices the forward is not run again."""
    profile, cluster = _one_layer(), _pair(36 * MIB)
    plan = search(profile, cluster, 2, shard=True, recompute=True).plan
    assert [(s.shard, s.recompute) for s in plan.stages] == [("optimizer", False)]


def test_a_long_update_shared_by_two_by_hand() -> None:
    """1 s forward, 2 s backward, AllReduce of 10 MiB, half of 10 s of update, half an AllReduce.

    A bound that does not share the update, such as 1 + 2 + 10 s, would be above it.
    """
    profile, cluster = _one_layer(update=10.0), _pair(36 * MIB)
    plan = search(profile, cluster, 2, shard=True).plan
    assert plan.predicted is not None
    step, bound = plan.predicted.step_seconds, plan.predicted.lower_bound_seconds
    assert step == pytest.approx(8.0 + 1.5 * 10 * MIB / 1e9, abs=1e-3)
    assert bound is not None
    assert 7.9 < bound <= step
    problem = Problem(profile, cluster, 2, shard=True)
    found = all_shares(problem, 1, 1)
    assert meets(relax(problem, found), step)
    assert not meets(relax(problem, found), 7.9)
    assert Demand.of(problem, found).meets(step)
    assert not Demand.of(problem, found).meets(7.9)
    (least,) = layout_bounds(problem.tables(1), all_bounds(1, 1), ((0, 1),), shard=True)
    assert 7.9 < least <= step


@settings(max_examples=100, deadline=None)
@given(profiles(), clusters(), st.integers(1, 13), st.data())
def test_bounds_hold_for_shared_state(
    profile: ModelProfile, cluster: Cluster, batch: int, data: st.DataObject
) -> None:
    """No plan whose stages share out their state is below either lower bound, and all fit."""
    problem = Problem(profile, cluster, batch, shard=True)
    count = data.draw(st.integers(1, batch), label="M")
    stages = data.draw(st.integers(1, min(problem.num_layers, problem.num_devices)))
    devices = data.draw(st.sampled_from(list(device_sequences(problem.machine_sizes, stages))))
    bounds = data.draw(st.sampled_from(all_bounds(problem.num_layers, stages).tolist()))
    fitting = problem.fit(Layout(tuple(bounds), devices, count, shard=True), "test")
    if isinstance(fitting, Refusal):
        return
    if data.draw(st.booleans(), label="all"):
        fitting = tuple(stage.model_copy(update={"shard": "optimizer"}) for stage in fitting)
    seconds = problem.step_seconds(fitting, count)
    found = all_shares(problem, *next(r for r in ranges(problem) if r[0] <= count <= r[1]))
    assert meets(relax(problem, found), seconds)
    assert Demand.of(problem, found).meets(seconds)
    shape = all_bounds(problem.num_layers, stages)
    (least,) = layout_bounds(
        problem.tables(count), shape[(shape == bounds).all(axis=1)], devices, shard=True
    )
    assert least <= seconds * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(profiles(max_layers=5), clusters(max_devices=4), st.integers(1, 8), st.booleans())
def test_sharing_never_makes_the_plan_longer(
    profile: ModelProfile, cluster: Cluster, batch: int, exact: bool
) -> None:
    """What fits without it is a candidate still, in the exact mode; no bound is above the step."""
    options = SearchOptions(exact=exact)
    try:
        plain = search(profile, cluster, batch, options=options).plan
    except MemoryPlanError:
        plain = None
    try:
        plan = search(profile, cluster, batch, shard=True, options=options).plan
    except MemoryPlanError:
        assert plain is None
        return
    assert plan.predicted is not None
    bound, step = plan.predicted.lower_bound_seconds, plan.predicted.step_seconds
    assert bound is not None
    assert bound <= step * (1 + 1e-9)
    if exact and plain is not None and plain.predicted is not None:
        assert step <= plain.predicted.step_seconds * (1 + 1e-9)


def test_an_update_without_parameters_is_not_shared() -> None:
    """A profile may say so: there is nothing that a replica could do for the other."""
    layer = LayerProfile(
        name="l",
        forward_seconds=(1.0,),
        backward_seconds=(2.0,),
        parameter_bytes=0,
        saved_bytes=(MIB,),
        optimizer_seconds=0.5,
    )
    profile = ModelProfile(model="one", device="d", batch_sizes=(1,), layers=(layer,))
    problem = Problem(profile, _pair(2**30), 2, shard=True)
    stages = problem.fit(Layout((0, 1), ((0, 1),), 1), "test")
    assert not isinstance(stages, Refusal)
    shared = stages[0].model_copy(update={"shard": "optimizer"})
    assert problem.step_seconds([shared], 1) == pytest.approx(3.5)
