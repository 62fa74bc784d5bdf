"""Virtual stages, split backwards and a user's own schedules in the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.costs import CostModel, PipelineCosts, pipeline_costs, stage_memory
from dapple.errors import ScheduleError
from dapple.records import LayerProfile, ModelProfile, Plan, StagePlan
from dapple.schedule import check_schedule, make_schedule, save_schedule, schedule_for
from dapple.simulator import predict, simulate
from dapple.simulator.rows import run_rows
from dapple.simulator.simulation import run
from tests.simulator.oracle import World
from tests.simulator.pipelines import chain, cluster, plan, random_plans
from tests.simulator.rows_oracle import rows_step_seconds
from tests.simulator.test_against_oracles import same_times, several_buckets

__all__ = ["several_buckets"]  # used by every test here: buckets as small as the profiles

FAST = cluster(8, bandwidth=1e12)


def interleaved_plan(positions: int, virtual: int, micro_batches: int) -> Plan:
    """One layer per virtual stage, one row per micro-batch."""
    count = positions * virtual
    stages = [StagePlan(start=i, stop=i + 1, devices=(i % positions,)) for i in range(count)]
    return Plan(
        model="chain",
        global_batch_size=micro_batches,
        micro_batch_size=1,
        num_micro_batches=micro_batches,
        schedule="interleaved",
        virtual=virtual,
        stages=tuple(stages),
        cluster=FAST,
    )


@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(virtual: int):
    """(M + (S - 1) / v) (F + B), where F and B are a device's for one micro-batch."""
    profile = chain([1.0 / virtual] * 4 * virtual, [2.0 / virtual] * 4 * virtual)
    found = simulate(interleaved_plan(4, virtual, 8), profile)
    assert found.step_seconds == pytest.approx((8 + 3 / virtual) * 3)
    assert found.bubble_fraction == pytest.approx(1 - 8 / (8 + 3 / virtual))


def test_zero_bubble_leaves_what_the_weights_can_not_fill():
    """M (F + I + W) + (S - 1) (F + I - W), with no more in flight than on stage 0."""
    made = plan([1] * 4, 8, 8, FAST, schedule="zero-bubble")
    profile = chain([1.0] * 4, [2.0] * 4)
    found = simulate(made, profile)
    assert found.step_seconds == pytest.approx(8 * 3 + 3 * 1)
    assert found.in_flight == (4, 4, 4, 4)
    layers = [layer.model_copy(update={"weight_seconds": (0.5,)}) for layer in profile.layers]
    uneven = profile.model_copy(update={"layers": tuple(layers)})
    assert simulate(made, uneven).step_seconds == pytest.approx(8 * 3 + 3 * (1 + 1.5 - 0.5))
    kinds = {span.kind for span in found.spans}
    assert {"forward", "input", "weight"} <= kinds
    assert "backward" not in kinds
    assert found.busy_seconds(2) == pytest.approx(8 * 3)


@settings(max_examples=100)
@given(random_plans(contended=True) | random_plans(contended=False))
def test_all_engines_agree_on_plain_schedules(case: tuple[Plan, ModelProfile]):
    """Early backward and GPipe, on shared cards too: every computation, message and AllReduce."""
    made, profile = case
    costs = costs_of(made, profile)
    schedule = make_schedule(made.schedule, made.num_micro_batches, costs.warmup)
    rows = run_rows(costs, schedule, check_schedule(schedule, links=costs.links))
    same_times(run(costs, made.schedule), rows)


def test_batch_norms_of_replicas_add_up_their_statistics_in_every_forward_and_backward():
    """Of the first of two layers: 2 x 10 bytes at 1 byte/s in the forward, 10 in the backward.

    The second layer's gradients (20 s) are summed from 24 s on, while the first one's backward waits.
    """
    profile = chain([1.0] * 2, [2.0] * 2, parameter_bytes=20)
    first = profile.layers[0].model_copy(update={"statistics_bytes": (10,)})
    profile = profile.model_copy(update={"layers": (first, profile.layers[1])})
    found = simulate(plan([2], 2, 1, cluster(2), cuts=[2]), profile)
    times = {(s.kind, s.start, s.end) for s in found.spans if s.rank == 0}
    assert {("forward", 0, 22), ("backward", 22, 36)} <= times
    sums = sorted((s.start, s.end) for s in found.spans if s.kind == "allreduce" and s.rank == 0)
    assert sums == [pytest.approx((24, 44)), pytest.approx((44, 64))]
    alone = plan([1, 1], 2, 1, cluster(2))
    assert predict(alone, profile) == predict(alone, profile.without_statistics())
    local = simulate(plan([2], 2, 1, cluster(2), cuts=[2]), profile.without_statistics())
    assert local.step_seconds == pytest.approx(44)


def test_virtual_stages_add_up_their_gradients_one_after_the_other():
    """The later stage's at 4 s, when its backward ends; the earlier one's not at 6 s, but after it."""
    profile = chain([1.0] * 2, [2.0] * 2, parameter_bytes=10)
    made = plan([2], 2, 1, cluster(2))
    stages = [made.stages[0].model_copy(update={"start": n, "stop": n + 1}) for n in (0, 1)]
    changes = {"stages": tuple(stages), "virtual": 2, "schedule": "interleaved"}
    found = simulate(made.model_copy(update=changes), profile)
    sums = {s.stage: (s.start, s.end) for s in found.spans if s.kind == "allreduce"}
    assert sums == {1: pytest.approx((4, 14)), 0: pytest.approx((14, 24))}
    assert found.step_seconds == pytest.approx(24)


@settings(max_examples=60, deadline=None)
@given(random_plans(contended=True) | random_plans(contended=False), st.floats(0.1, 1.0))
def test_replicas_that_run_alike_are_simulated_once_with_split_backwards_too(
    case: tuple[Plan, ModelProfile], share: float
):
    """The fast way to the step gives what simulating every replica gives."""
    made, profile = case
    split = made.model_copy(update={"schedule": "zero-bubble"})
    layers = [
        layer.model_copy(
            update={"weight_seconds": tuple(share * t for t in layer.backward_seconds)}
        )
        for layer in profile.layers
    ]
    profile = profile.model_copy(update={"layers": tuple(layers)})
    predicted = predict(split, profile).step_seconds
    assert predicted == pytest.approx(simulate(split, profile).step_seconds)


@settings(max_examples=150, deadline=None)
@given(random_plans(contended=False), st.data())
def test_any_rows_equal_the_longest_path_of_the_dependency_graph(
    case: tuple[Plan, ModelProfile], data: st.DataObject
):
    """Zero bubble, and virtual stages over the same devices, some of their backwards split."""
    made, profile = case
    profile = profile.model_copy(update={"tied": ()})
    count = made.num_stages
    virtual = data.draw(st.sampled_from([v for v in range(1, count + 1) if count % v == 0]))
    if virtual > 1:
        made = folded(made, virtual)
    name = "interleaved" if virtual > 1 else "zero-bubble"
    costs = costs_of(made, profile)
    schedule = schedule_for(name, made.num_micro_batches, costs.warmup, costs.positions)
    room = check_schedule(schedule, links=costs.links)
    expected = rows_step_seconds(
        World(made, profile), schedule.actions, (room.inputs, room.gradients)
    )
    assert run_rows(costs, schedule, room).step_seconds == pytest.approx(expected, rel=1e-9)


def folded(made: Plan, virtual: int) -> Plan:
    """The plan with stage i + S on the devices of stage i."""
    positions = made.num_stages // virtual
    stages = [
        stage.model_copy(update={"devices": made.stages[number % positions].devices})
        for number, stage in enumerate(made.stages)
    ]
    fields = {"stages": tuple(stages), "virtual": virtual, "schedule": "interleaved"}
    return made.model_copy(update=fields)


def costs_of(made: Plan, profile: ModelProfile) -> PipelineCosts:
    """The costs of a plan."""
    model = CostModel(profile, made.cluster, made.network_model)
    return pipeline_costs(model, made.stages, made.global_batch_size, made.num_micro_batches)


def test_a_users_own_schedule_is_simulated_from_its_file(tmp_path: Path):
    """Early backward written out gives early backward's seconds."""
    made = plan([2, 1], 12, 4, FAST, warmup=[2, 1])
    profile = chain([1.0, 2.0], [2.0, 3.0])
    path = tmp_path / "own.csv"
    save_schedule(make_schedule("early-backward", 4, (2, 1)), path)
    own = simulate(made, profile, schedule=str(path))
    assert own.step_seconds == pytest.approx(simulate(made, profile).step_seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "has 1 rows, but the plan has 2 positions"),
        ("0F0,2F0,2B0,0B0\n1F0,1B0\n", r"row 1: it runs the stages \[0, 2\], .* hold \[0\]"),
        ("0F0,0B0\n1F0,1B0\n", "is for 1 micro-batches, but the step has 2"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlock: stage 0 waits at 0B0 for 1B0"),
    ],
)
def test_a_schedule_for_another_plan_is_refused(text: str, message: str, tmp_path: Path):
    """Rows, stages and micro-batches have to be the plan's, and it has to end."""
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(ScheduleError, match=message):
        simulate(
            plan([1, 1], 4, 2, FAST), chain([1.0] * 2, [1.0] * 2), schedule=f"{tmp_path}/own.csv"
        )


def saving(layers: int, saved: int) -> ModelProfile:
    """A chain whose layers save bytes."""
    made = chain([1.0] * layers, [2.0] * layers, bytes_per_row=3.0, parameter_bytes=100)
    new: list[LayerProfile] = [
        layer.model_copy(update={"saved_bytes": (saved,)}) for layer in made.layers
    ]
    return made.model_copy(update={"layers": tuple(new)})


def test_peak_memory_counts_what_each_row_holds():
    """By hand: early backward as before, zero bubble twice where weights wait, chunks together."""
    profile = saving(2, 10)
    made = plan([1, 1], 4, 4, FAST, warmup=[2, 1])
    model = CostModel(profile, FAST)
    parts = [stage_memory(model, made.stages, s, 1, 2 - s) for s in range(2)]
    assert simulate(made, profile).peak_bytes == tuple(p.total for p in parts if p)
    # Stage 1 holds F0 I0 F1 I1: two micro-batches, each with gradients, 2 + 1 received, as many sent.
    zero = simulate(made, profile, schedule="zero-bubble").peak_bytes
    assert zero[1] == 4 * 100 + 4 * 10 + 2 * 3 * 3
    # Stage 0: two in flight, the gradients of one.
    assert zero[0] == 4 * 100 + 3 * 10 + 2 * 3
    folded_plan = interleaved_plan(1, 2, 4)
    # One device, both layers: one micro-batch of each; only gradients are held beside them.
    assert simulate(folded_plan, profile).peak_bytes == (8 * 100 + 2 * 10 + 2 * 3,)
