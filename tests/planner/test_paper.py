"""The paper's planner: the best plan by its own printed formula, judged by the simulator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from dapple.cluster import Cluster
from dapple.costs import seconds_at
from dapple.planner import compare, search
from dapple.planner.formulas import expand, paper_latency
from dapple.planner.paper import paper, printed_seconds
from dapple.planner.problem import Layout, Problem
from dapple.records import ModelProfile
from tests.planner.instances import random_cluster, random_profile


def _latency(problem: Problem, layout: Layout) -> float:
    """The printed formula of a layout, from the profile's numbers."""
    profile, network = problem.profile, problem.model.network
    rows = problem.global_batch_size / layout.micro_batches
    times: list[list[float]] = [[], []]
    sums = []
    for (start, stop), devices in zip(
        itertools.pairwise(layout.bounds), layout.devices, strict=True
    ):
        layers = profile.layers[start:stop]
        measured = [[n.forward_seconds for n in layers], [n.backward_seconds for n in layers]]
        for found, values in zip(times, measured, strict=True):
            found.append(
                sum(seconds_at(profile.batch_sizes, v, rows / len(devices)) for v in values)
            )
        sums.append(network.ring(devices).seconds(sum(n.parameter_bytes for n in layers)))
    moved: list[list[float]] = [[], []]
    for cut, (left, right) in zip(
        layout.bounds[1:-1], itertools.pairwise(layout.devices), strict=True
    ):
        size = profile.tensors[cut - 1].bytes_per_sample * rows
        for found, (senders, receivers) in zip(moved, ((left, right), (right, left)), strict=True):
            found.append(
                max(
                    network.route(d, e).seconds(size * _shared(senders, receivers, a, b))
                    for (a, d), (b, e) in itertools.product(
                        enumerate(senders), enumerate(receivers)
                    )
                )
            )
    forward, backward = (expand(*pair) for pair in zip(times, moved, strict=True))
    reduces = expand(sums, [0.0] * len(moved[0]))
    return paper_latency(forward, backward, reduces, layout.micro_batches)


def _shared(senders: tuple[int, ...], receivers: tuple[int, ...], a: int, b: int) -> float:
    """Part of the rows that replica a has on one side and b on the other."""
    low = max(a / len(senders), b / len(receivers))
    high = min((a + 1) / len(senders), (b + 1) / len(receivers))
    return high - low if high - low > 1e-12 else 0.0


def _all_plans(layers: int, cluster: Cluster, micro_batches: int) -> Iterator[Layout]:
    """Every plan that uses all devices, each stage's devices in any order of the machines."""
    every = range(cluster.num_devices)
    for stages in range(1, min(layers, cluster.num_devices) + 1):
        for owners in itertools.product(range(stages), repeat=cluster.num_devices):
            devices = tuple(tuple(d for d in every if owners[d] == s) for s in range(stages))
            if not all(devices):
                continue
            for cuts in itertools.combinations(range(1, layers), stages - 1):
                yield Layout((0, *cuts, layers), devices, micro_batches)


@pytest.mark.parametrize("seed", range(12))
def test_best_plan_by_the_printed_formula(seed: int) -> None:
    """On three devices, where the recursion leaves nothing out, no plan has a lower latency."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, 5), random_cluster(rng, rng.choice((2, 3)))
    problem = Problem(profile, cluster, 12)
    for count in (1, 4, 12):
        (layout,) = paper(problem, count)
        best = min(_latency(problem, other) for other in _all_plans(5, cluster, count))
        assert _latency(problem, layout) == pytest.approx(best, rel=1e-9)
        assert printed_seconds(problem, layout) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_no_pipeline_of_two_stages_is_better(seed: int) -> None:
    """On eight devices the answer may miss long pipelines, but no placement of short ones."""
    rng = random.Random(100 + seed)
    profile, cluster = random_profile(rng, 7), random_cluster(rng, 8)
    problem = Problem(profile, cluster, 20)
    (layout,) = paper(problem, 8)
    found = _latency(problem, layout)
    assert sorted(itertools.chain(*layout.devices)) == list(range(8))
    for cut, first in itertools.product(range(1, 7), range(1, 8)):
        devices = tuple(range(first)), tuple(range(first, 8))
        assert found <= _latency(problem, Layout((0, cut, 7), devices, 8)) * (1 + 1e-9)


def _small() -> tuple[ModelProfile, Cluster]:
    rng = random.Random(3)
    return random_profile(rng, 6), random_cluster(rng, 4)


def test_plan_says_what_the_formula_expected() -> None:
    """The simulator judges the plan; the note has both figures."""
    profile, cluster = _small()
    plan = search(profile, cluster, 16, planner="paper").plan
    assert plan.planner == "paper"
    assert plan.predicted is not None
    bounds = (0, *(stage.stop for stage in plan.stages))
    layout = Layout(bounds, tuple(stage.devices for stage in plan.stages), plan.num_micro_batches)
    printed = printed_seconds(Problem(profile, cluster, 16), layout)
    (note,) = [note for note in plan.notes if "formula as printed" in note]
    assert f"{printed:.4g} s" in note
    assert f"{plan.predicted.step_seconds:.4g} s" in note


def test_comparison_has_its_row_behind_ours() -> None:
    """`compare` shows the paper's plan, no shorter than the search's."""
    steps = {row.planner: row.step_seconds for row in compare(*_small(), 16)}
    ours, theirs = steps["dapple"], steps["paper"]
    assert ours is not None
    assert theirs is not None
    assert ours <= theirs * (1 + 1e-9)
