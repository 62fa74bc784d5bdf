"""The estimate of a step, and the search for better cuts and devices by it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, preset
from dapple.planner.climb import climb
from dapple.planner.cuts import better_cuts, estimate_all
from dapple.planner.estimate import estimate_seconds, spans, waiting_chain
from dapple.planner.exact import all_bounds
from dapple.planner.layout import WIDE, Layout
from dapple.planner.moves import Around, Places, longest_work
from dapple.planner.neighbours import pack
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.records import ModelProfile
from tests.planner.instances import random_cluster, random_profile
from tests.planner.strategies import clusters, profiles


def _guess(problem: Problem, layout: Layout) -> float:
    warmup = problem.guess_warmup(layout)
    return np.inf if warmup is None else estimate_seconds(problem, layout, warmup)


def _layouts(problem: Problem, data: st.DataObject) -> Layout:
    most = min(problem.num_layers, problem.num_devices)
    stages = data.draw(st.integers(1, most))
    cuts = sorted(data.draw(st.permutations(range(1, problem.num_layers)))[: stages - 1])
    ends = sorted(data.draw(st.permutations(range(1, problem.num_devices + 1)))[:stages])
    counts = np.diff([0, *ends]).tolist()
    order = tuple(range(problem.num_devices))
    return Layout(
        (0, *cuts, problem.num_layers),
        pack(order, counts),
        data.draw(st.sampled_from(problem.micro_batch_counts)),
    )


@settings(max_examples=80, deadline=None)
@given(
    profiles(),
    clusters(),
    st.integers(1, 40),
    st.sampled_from(["early-backward", "gpipe"]),
    st.data(),
)
def test_many_cuts_at_once(
    profile: ModelProfile, cluster: Cluster, batch: int, schedule: str, data: st.DataObject
) -> None:
    """The estimates of many cuts are those of each alone, but for the buckets of AllReduces."""
    problem = Problem(profile, cluster, batch, schedule=schedule)
    layout = _layouts(problem, data)
    bounds = all_bounds(problem.num_layers, layout.num_stages)
    policies = ("A", "B", WIDE)
    guesses = estimate_all(problem, [layout], np.zeros(len(bounds), int), bounds, policies)
    for row, (number, policy) in itertools.product(range(len(bounds)), enumerate(policies)):
        other = replace(layout, bounds=tuple(map(int, bounds[row])), policy=policy)
        alone = _guess(problem, other)
        if not profile.tied:
            assert guesses[number, row] <= alone * (1 + 1e-12)
        if max(map(len, layout.devices)) == 1:
            assert guesses[number, row] == pytest.approx(alone, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([4, 12, 32]), st.data())
def test_never_above_the_simulated_step_without_contention(
    seed: int, count: int, data: st.DataObject
) -> None:
    """Where rows divide evenly and nothing is shared, the estimate leaves out, but adds nothing."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, 8), random_cluster(rng, 6)
    problem = Problem(profile, cluster, 60 * count, micro_batch_size=60, network_model="paper")
    layout = _layouts(problem, data)
    stages = layout.stages(
        sorted(data.draw(st.lists(st.integers(1, 9), min_size=8, max_size=8)), reverse=True)[
            : layout.num_stages
        ]
    )
    warmup = [min(stage.warmup, count) for stage in stages]
    stages = layout.stages(warmup)
    simulated = problem.step_seconds(stages, count)
    assert estimate_seconds(problem, layout, warmup) <= simulated * (1 + 1e-9)


def test_stages_that_may_run_equally_far_ahead_wait_for_each_other() -> None:
    """Where memory makes warm-up counts equal, the estimate sees that stages take turns."""
    profile = random_profile(random.Random(1), 8)
    problem = Problem(profile, preset("config-a:1x4"), 32, micro_batch_size=1)
    layout = Layout((0, 2, 4, 6, 8), tuple((d,) for d in range(4)), 32)
    steps = {}
    for warmup in ([4, 3, 2, 1], [3, 3, 3, 1]):
        steps[warmup[0]] = problem.step_seconds(layout.stages(warmup), 32)
        assert estimate_seconds(problem, layout, warmup) == pytest.approx(
            steps[warmup[0]], rel=0.06
        )
    assert steps[3] > 1.2 * steps[4]


@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 40))
def test_waiting_chains(later: int, ahead: int, more: int) -> None:
    """The chain ends with the last micro-batch, and its first one waits for nobody."""
    own, total = later + ahead, later + ahead + more
    first, rounds = waiting_chain(own, later, total)
    assert first + rounds * (ahead + 1) == total - 1
    assert later - 1 <= first < own
    assert rounds >= 1


@given(st.integers(1, 300))
def test_distances_between_stages(stages: int) -> None:
    """The stage itself and the last one are always looked at, and few distances in between."""
    found = spans(stages)
    assert found[0] == 0
    assert found[-1] == stages - 1
    assert len(found) <= 20


@pytest.mark.parametrize("seed", range(6))
def test_better_cuts_of_two_and_three_stages(seed: int) -> None:
    """Of short pipelines the best cuts of all are found, from even ones."""
    rng = random.Random(seed)
    stages = 2 + seed % 2
    problem = Problem(random_profile(rng, 12), random_cluster(rng, 6), 64)
    layout = Layout(
        tuple(12 * s // stages for s in range(stages + 1)),
        pack(tuple(range(6)), [6 - stages + 1, *[1] * (stages - 1)]),
        8,
    )
    seconds, found = better_cuts(problem, layout, "AB")
    bounds = all_bounds(12, stages)
    every = estimate_all(problem, [layout], np.zeros(len(bounds), int), bounds, "AB")
    assert seconds <= _guess(problem, found) * (1 + 1e-12)
    assert seconds <= every.min() * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_climbing_goes_up(seed: int) -> None:
    """What is found fits together, and the last is at least as good as the first."""
    rng = random.Random(seed)
    problem = Problem(random_profile(rng, 12), random_cluster(rng, 6), 64)
    layout = Layout((0, 6, 12), ((0, 1, 2, 3), (4, 5)), 8)
    found = list(climb(problem, layout))
    for other in found:
        assert not isinstance(problem.fit(other, ""), Refusal)
    assert min(_guess(problem, o) for o in found) <= _guess(problem, layout) * (1 + 1e-9)
    changed = {(other.devices, other.micro_batches) for other in found}
    assert len(changed) > 1


@pytest.mark.parametrize("seed", range(12))
def test_moved_cuts_from_what_is_left_alone(seed: int) -> None:
    """What stages take after a move, from sums before and behind it, is what they take looked at anew."""
    rng = random.Random(seed)
    problem = Problem(random_profile(rng, 24), random_cluster(rng, 6), 64)
    counts = [2, 1, 1, 1, 1] if seed % 2 else [1, 1, 1, 1, 2]
    layout = Layout((0, 5, 10, 15, 20, 24), pack(tuple(range(6)), counts), rng.choice([1, 2, 32]))
    places = Places.of(problem, [layout])
    here = np.array([layout.bounds])
    cut, shift = (part.ravel() for part in np.meshgrid([1, 2, 3, 4], [-4, -2, -1, 1, 3]))
    moved, none = here.repeat(len(cut), axis=0), np.zeros(len(cut), int)
    moved[np.arange(len(cut)), cut] += shift
    around = Around(places, here).longest_work(none, moved, cut - 1, 2)
    _, anew = longest_work(places.seconds(places.stage[:, none], places.link[:, none], moved.T))
    assert around == pytest.approx(anew, rel=1e-12)
