"""The lower bound of a layout never lies above its simulated step."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster
from dapple.planner.bounds import layout_bounds
from dapple.planner.exact import all_bounds, device_sequences
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.records import ModelProfile
from dapple.schedule import warmup_counts
from tests.planner.strategies import clusters, profiles


@settings(max_examples=150, deadline=None)
@given(profiles(), clusters(), st.integers(1, 9), st.data())
def test_bound_is_below_the_simulated_step(
    profile: ModelProfile, cluster: Cluster, batch: int, data: st.DataObject
) -> None:
    """For random layouts under both warm-up policies: skips, ties, mixed speeds, rows either way."""
    problem = Problem(profile, cluster, batch, proportional=data.draw(st.booleans()))
    count = data.draw(st.integers(1, batch), label="M")
    stages = data.draw(st.integers(1, min(problem.num_layers, problem.num_devices)))
    sequences = list(device_sequences(problem.machine_sizes, stages))
    devices = data.draw(st.sampled_from(sequences), label="devices")
    bounds = all_bounds(problem.num_layers, stages)
    least = layout_bounds(problem.tables(count), bounds, devices)
    for row, bound in zip(bounds, least, strict=True):
        layout = Layout(tuple(map(int, row)), devices, count)
        policy = data.draw(st.sampled_from("AB"))
        warmup = zip(
            problem.split_stages(layout), warmup_counts(stages, count, policy), strict=True
        )
        plan = [stage.model_copy(update={"warmup": k}) for stage, k in warmup]
        seconds = problem.step_seconds(plan, count)
        assert bound <= seconds * (1 + 1e-9)


def test_all_bounds_are_complete_and_distinct() -> None:
    """Every composition of the layers appears once."""
    for layers in range(1, 7):
        for stages in range(1, layers + 1):
            bounds = all_bounds(layers, stages)
            assert bounds.shape == (math.comb(layers - 1, stages - 1), stages + 1)
            assert len(np.unique(bounds, axis=0)) == len(bounds)
            assert (np.diff(bounds, axis=1) > 0).all()
