"""The simulator against a second one that shares no code with it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from dapple.costs import CostModel, pipeline_costs
from dapple.records import ModelProfile, Plan
from dapple.simulator import simulate, step_seconds
from dapple.simulator.events import run_events
from dapple.simulator.simulation import run
from tests.simulator.naive import naive_step_seconds
from tests.simulator.oracle import World, oracle_step_seconds
from tests.simulator.pipelines import random_plans

Case = tuple[Plan, ModelProfile]


@settings(max_examples=500)
@given(random_plans(contended=False))
def test_unshared_steps_equal_the_longest_path_of_the_dependency_graph(case: Case):
    """On pipelines in which nothing shares a card, in both network models."""
    plan, profile = case
    expected = oracle_step_seconds(World(plan, profile))
    assert simulate(plan, profile, spans=False).step_seconds == pytest.approx(expected, rel=1e-9)


@settings(max_examples=120)
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
    plan, profile = case
    model = CostModel(profile, plan.cluster, plan.network_model)
    costs = pipeline_costs(model, plan.stages, plan.global_batch_size, plan.num_micro_batches)
    static = run(costs, "early-backward")
    orders = [_order(plan, s) for s in range(plan.num_stages)]
    events = run_events(dataclasses.replace(costs, contended={}), orders, costs.warmup)
    for one, other in (
        (static.forward_end, events.forward_end),
        (static.backward_end, events.backward_end),
        ([static.ends], [events.ends]),
    ):
        for here, there in zip(one, other, strict=True):
            assert here == pytest.approx(there, rel=1e-9)


def _order(plan: Plan, stage: int) -> tuple[int, ...]:
    world = World(plan.model_copy(update={"schedule": "early-backward"}), None)  # type: ignore[arg-type]
    return tuple(m if kind == "F" else ~m for kind, m in world.order(stage))


@settings(max_examples=50)
@given(random_plans(contended=True))
def test_the_fast_path_gives_the_same_seconds(case: Case):
    """`step_seconds` is `simulate` without spans and records."""
    plan, profile = case
    model = CostModel(profile, plan.cluster, plan.network_model)
    fast = step_seconds(
        model, plan.stages, plan.global_batch_size, plan.num_micro_batches, plan.schedule
    )
    assert fast == simulate(plan, profile).step_seconds
