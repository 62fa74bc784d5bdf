"""The paper's planner: the best plan by its own formula, judged by the simulator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from dapple.cluster import Cluster
from dapple.costs import seconds_at
from dapple.planner import compare, search
from dapple.planner.baselines import BASELINES
from dapple.planner.formulas import expand
from dapple.planner.layout import Layout
from dapple.planner.paper import FORMULAS, Latency, expected_seconds
from dapple.planner.problem import Problem
from dapple.records import ModelProfile
from tests.planner.instances import random_cluster, random_profile


def _latency(problem: Problem, layout: Layout, formula: Latency) -> float:
    """A formula's latency of a layout, from the profile's numbers."""
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
    return formula(forward, backward, reduces, layout.micro_batches)


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


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", range(12))
def test_best_plan_by_its_formula(name: str, seed: int) -> None:
    """On three devices, where the recursion leaves nothing out, no plan has a lower latency."""
    rng, formula = random.Random(seed), FORMULAS[name]
    profile, cluster = random_profile(rng, 5), random_cluster(rng, rng.choice((2, 3)))
    problem = Problem(profile, cluster, 12)
    for count in (1, 4, 12):
        (layout,) = BASELINES[name](problem, count)
        best = min(_latency(problem, other, formula) for other in _all_plans(5, cluster, count))
        assert _latency(problem, layout, formula) == pytest.approx(best, rel=1e-9)
        assert expected_seconds(problem, layout, formula) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", range(4))
def test_no_pipeline_of_two_stages_is_better(name: str, seed: int) -> None:
    """On eight devices the answer may miss long pipelines, but no placement of short ones."""
    rng, formula = random.Random(100 + seed), FORMULAS[name]
    profile, cluster = random_profile(rng, 7), random_cluster(rng, 8)
    problem = Problem(profile, cluster, 20)
    (layout,) = BASELINES[name](problem, 8)
    found = _latency(problem, layout, formula)
    assert sorted(itertools.chain(*layout.devices)) == list(range(8))
    for cut, first in itertools.product(range(1, 7), range(1, 8)):
        devices = tuple(range(first)), tuple(range(first, 8))
        other = _latency(problem, Layout((0, cut, 7), devices, 8), formula)
        assert found <= other * (1 + 1e-9)


def _small() -> tuple[ModelProfile, Cluster]:
    rng = random.Random(3)
    return random_profile(rng, 6), random_cluster(rng, 4)


@pytest.mark.parametrize(
    ("name", "words"), [("paper", "as printed"), ("paper-corrected", "with the corrected pivot")]
)
def test_plan_says_what_its_formula_expected(name: str, words: str) -> None:
    """The simulator judges the plan; the note has both figures."""
    profile, cluster = _small()
    plan = search(profile, cluster, 16, planner=name).plan
    assert plan.planner == name
    assert plan.predicted is not None
    bounds = (0, *(stage.stop for stage in plan.stages))
    layout = Layout(bounds, tuple(stage.devices for stage in plan.stages), plan.num_micro_batches)
    expected = expected_seconds(Problem(profile, cluster, 16), layout, FORMULAS[name])
    (note,) = [note for note in plan.notes if f"formula {words}" in note]
    assert f"{expected:.4g} s" in note
    assert f"{plan.predicted.step_seconds:.4g} s" in note


def test_the_printed_pivot_expects_less() -> None:
    """With M - 1 for M on one side it moves from stage to stage where each is a little slower."""
    profile, cluster = _small()
    layers = [
        layer.model_copy(
            update={
                "forward_seconds": (8e-2 - 4e-3 * n,) * 2,
                "backward_seconds": (8e-2 - 4e-3 * n,) * 2,
                "parameter_bytes": 0,
            }
        )
        for n, layer in enumerate(profile.layers[:4])
    ]
    tensors = [t.model_copy(update={"bytes_per_sample": 1e3}) for t in profile.tensors[:3]]
    chain = profile.model_copy(update={"layers": layers, "tensors": tensors})
    problem = Problem(chain, cluster, 16)
    layout = Layout((0, 1, 2, 3, 4), ((0,), (1,), (2,), (3,)), 4)
    printed, corrected = (expected_seconds(problem, layout, f) for f in FORMULAS.values())
    simulated = problem.step_seconds(layout.stages([4, 3, 2, 1]), 4)
    assert printed < 0.7 * corrected
    assert 0.9 * simulated < corrected <= simulated * (1 + 1e-9)


def test_comparison_has_their_rows_behind_ours() -> None:
    """`compare` shows the paper's plans, no shorter than the search's."""
    steps = {row.planner: row.step_seconds for row in compare(*_small(), 16)}
    ours = steps["dapple"]
    assert ours is not None
    for name in FORMULAS:
        theirs = steps[name]
        assert theirs is not None
        assert ours <= theirs * (1 + 1e-9)
