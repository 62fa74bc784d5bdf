"""Every plan trains like one process: float64, ranks as threads, messages without tags."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.planner import make_plan as planned
from dapple.records import LayerProfile, ModelProfile
from dapple.runtime.layout import Layout
from dapple.runtime.topology import Topology
from tests.runtime import cases
from tests.runtime.cases import Run
from tests.runtime.threads import OwnCopy, on_ranks, run_threads

FAST = Link(bandwidth=1e12)
SIZES = st.integers(1, 14)


def error(run: Run) -> float:
    """How far a run on threads is from one process."""
    graph = cases.build(run.model)
    return cases.error(
        run,
        run_threads(
            sum(run.replicas),
            lambda transport: cases.train(OwnCopy(graph), run, transport=transport),
        ),
    )


@pytest.mark.parametrize("replicas", [(1, 1), (3, 2), (2, 1, 2), (1,)], ids=str)
@pytest.mark.parametrize("name", list(cases.EXAMPLES))
def test_parameters_and_losses_equal_one_process(name: str, replicas: tuple[int, ...]) -> None:
    """Parameters after three steps and every loss equal one process on the whole batch."""
    assert error(Run(name, replicas, 5, 13)) < cases.TOLERANCE


@pytest.mark.parametrize("name", ["gpt", "skip"])
@pytest.mark.parametrize(
    "shares",
    [((3.0, 1.0), (1.0, 1.0, 2.0)), ((1.0, 0.0), None), ((0.0, 1.0), (0.0, 1.0, 0.2))],
    ids=str,
)
def test_proportional_rows_equal_one_process(
    name: str, shares: tuple[tuple[float, ...] | None, ...]
) -> None:
    """Shares of replicas that do not divide the rows, also zero, which leaves a replica idle."""
    run = Run(name, (2, 3), 4, 13, (13, 5, 30), split="early", shares=shares)
    assert error(run) < cases.TOLERANCE


def test_a_planned_split_of_the_rows_equals_one_process() -> None:
    """The search's own plan for devices of different speed, also with other batch sizes."""
    graph = cases.build("mlp")
    layers = [
        LayerProfile(name=f"l{n}", forward_seconds=(1e-3,), backward_seconds=(1e-3,))
        for n in range(graph.num_layers)
    ]
    profile = ModelProfile(model="mlp", device="d", batch_sizes=(1,), layers=layers)
    groups = [
        Machines(devices=n, kind=DeviceKind(name=f"{v}", memory=2**30, speed=v), inside=FAST)
        for n, v in ((1, 1.0), (2, 0.4))
    ]
    groups = [group.model_copy(update={"outside": FAST}) for group in groups]
    plan = planned(profile, Cluster(name="mixed", machines=groups), 13, micro_batch_size=7)
    assert plan.stages[0].rows == (5.0, 1.0, 1.0)
    rows = (13, 5, 30)
    wanted, losses = cases.reference("mlp", rows, "adamw")
    results = on_ranks(
        graph,
        plan,
        lambda trainer: (
            [trainer.step(*cases.EXAMPLES["mlp"].batch(n, s)).loss for s, n in enumerate(rows)],
            trainer.state_dict(),
        ),
        cases.OPTIMIZERS["adamw"],
    )
    assert cases.global_error([state for _, state in results], wanted) < cases.TOLERANCE
    assert all(found == pytest.approx(losses, rel=cases.TOLERANCE) for found, _ in results)


def test_rows_follow_the_shares() -> None:
    """Replicas of shares 3 : 1 work on six and two of eight rows of each micro-batch."""
    graph = cases.build("mlp")
    plan = cases.make_plan(graph, (2,), 16, 2, shares=((3.0, 1.0),))
    layouts = [Layout(Topology.of(plan, rank, 2), 16) for rank in range(2)]
    assert [[layout.slice(m) for m in (0, 1)] for layout in layouts] == [
        [slice(0, 6), slice(8, 14)],
        [slice(6, 8), slice(14, 16)],
    ]


@settings(max_examples=25)
@given(
    st.builds(
        Run,
        model=st.sampled_from(list(cases.EXAMPLES)),
        replicas=st.lists(st.integers(1, 4), min_size=1, max_size=4)
        .filter(lambda replicas: sum(replicas) <= 7)
        .map(tuple),
        num_micro_batches=st.integers(1, 7),
        rows=SIZES,
        step_rows=st.tuples(SIZES, SIZES, SIZES),
        optimizer=st.sampled_from(list(cases.OPTIMIZERS)),
        schedule=st.sampled_from(["early-backward", "gpipe"]),
        split=st.sampled_from(["even", "early"]),
        policy=st.sampled_from(["A", "B"]),
    )
)
@example(Run("skip", (4, 1, 2), 7, 3, (3, 1, 14), split="early"))
@example(Run("gpt", (2, 3, 1, 1), 1, 14, (1, 14, 2), "sgd", "gpipe"))
def test_any_plan_and_any_batch_sizes_equal_one_process(run: Run) -> None:
    """Any replica counts and any batch sizes, step by step, give one process's parameters.

    Pitfall 1: replica counts that don't divide each other. Pitfall 5: micro-batches of unequal
    size. Pitfall 8: fewer micro-batches than stages.
    """
    assert error(run) < cases.TOLERANCE
