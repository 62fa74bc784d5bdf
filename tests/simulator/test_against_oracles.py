"""The simulator against a second one that shares no code with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.costs import CostModel, PipelineCosts, pipeline_costs
from dapple.records import ModelProfile, Plan
from dapple.simulator import Trace, simulate, step_seconds
from dapple.simulator.events import run_events
from dapple.simulator.static import run_static
from tests.simulator.naive import naive_step_seconds
from tests.simulator.oracle import BUCKET_BYTES, MOST_BUCKETS, World, oracle_step_seconds
from tests.simulator.pipelines import random_plans

Case = tuple[Plan, ModelProfile]


@pytest.fixture(autouse=True, scope="module")
def several_buckets() -> Iterator[None]:
    """Buckets so small that the gradients of a few layers fill several."""
    small = {"BUCKET_BYTES": BUCKET_BYTES, "MOST_BUCKETS": MOST_BUCKETS}
    with mock.patch.multiple("dapple.costs.model", **small):
        yield


@settings(max_examples=500)
@given(random_plans(contended=False))
def test_unshared_steps_equal_the_longest_path_of_the_dependency_graph(case: Case):
    """On pipelines in which nothing shares a card, in both network models."""
    plan, profile = case
    expected = oracle_step_seconds(World(plan, profile))
    assert simulate(plan, profile, spans=False).step_seconds == pytest.approx(expected, rel=1e-9)


@settings(max_examples=100)
@given(random_plans(contended=True))
def test_shared_steps_equal_a_naive_simulation_without_heap_or_shortcuts(case: Case):
    """On pipelines whose flows and AllReduces fill the cards of their machines."""
    plan, profile = case
    expected = naive_step_seconds(World(plan, profile))
    assert simulate(plan, profile, spans=False).step_seconds == pytest.approx(expected, rel=1e-9)


@settings(max_examples=100)
@given(random_plans(contended=False))
def test_both_engines_give_the_same_times_when_nothing_is_shared(case: Case):
    """The static engine is a shortcut, not a second opinion."""
    costs, orders = costs_of(case)
    static = run_static(costs, orders, costs.warmup)
    same_times(static, run_events(costs, orders, costs.warmup))


@settings(max_examples=150)
@given(random_plans(contended=False), st.floats(0, 1))
def test_the_event_engine_can_take_over_at_any_moment(case: Case, share: float):
    """From a static trace up to some time, the rest comes out the same."""
    costs, orders = costs_of(case)
    static = run_static(costs, orders, costs.warmup)
    again = run_static(costs, orders, costs.warmup)
    since = share * max(ends[-1] for ends in static.backward_end)
    same_times(static, run_events(costs, orders, costs.warmup, trace=again, since=since))


@settings(max_examples=150)
@given(random_plans(contended=True, even=True) | random_plans(contended=True))
def test_the_fast_path_gives_the_same_seconds(case: Case):
    """`step_seconds` merges replicas that run alike; `simulate` runs every one."""
    plan, profile = case
    model = CostModel(profile, plan.cluster, plan.network_model)
    fast = step_seconds(
        model, plan.stages, plan.global_batch_size, plan.num_micro_batches, plan.schedule
    )
    assert fast == pytest.approx(simulate(plan, profile).step_seconds, rel=1e-9)


def costs_of(case: Case) -> tuple[PipelineCosts, list[tuple[int, ...]]]:
    """The costs of a plan and its early-backward orders, as the engines want them."""
    plan, profile = case
    plan = plan.model_copy(update={"schedule": "early-backward"})
    model = CostModel(profile, plan.cluster, plan.network_model)
    costs = pipeline_costs(model, plan.stages, plan.global_batch_size, plan.num_micro_batches)
    world = World(plan, profile)
    orders = [tuple(m if kind == "F" else ~m for kind, m in world.order(s)) for s in world.stages]
    return costs, orders


def same_times(one: Trace, other: Trace) -> None:
    """Every computation, message and AllReduce at the same time."""
    for here, there in (
        (one.forward_end, other.forward_end),
        (one.backward_end, other.backward_end),
        ([one.ends], [other.ends]),
    ):
        for row, again in zip(here, there, strict=True):
            assert row == pytest.approx(again, rel=1e-9)
    for lanes in ("activations", "gradients"):
        for row, again in zip(getattr(one, lanes), getattr(other, lanes), strict=True):
            flat, same = [list(itertools.chain(*messages)) for messages in (row, again)]
            assert flat == pytest.approx(same, rel=1e-9, abs=1e-12)
    assert list(itertools.chain(*one.sums)) == pytest.approx(list(itertools.chain(*other.sums)))
