"""The general search against an enumeration of all contiguous plans, exact mode switched off."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, preset
from dapple.costs import bytes_at, seconds_at
from dapple.planner import SearchOptions, search
from dapple.planner.explore import best_first, uphill
from dapple.planner.frame import choose_step, device_orders, make_frame
from dapple.planner.general import GeneralSearch
from dapple.planner.grid import choose_marks
from dapple.planner.layers import all_at, all_bytes_at
from dapple.planner.layout import Layout
from dapple.planner.local import guess_seconds
from dapple.planner.neighbours import neighbours, shifted_cuts
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.records import LayerProfile, ModelProfile
from tests.planner.instances import brute_force, random_cluster, random_profile
from tests.planner.strategies import clusters, profiles

ALONE = SearchOptions(baselines=False, exact=False)


def _instances(seed: int, count: int) -> list[tuple[int, int, int, int, int]]:
    rng = random.Random(seed)
    return [
        (
            rng.randrange(10**9),
            rng.randint(2, 8),
            rng.randint(2, 5),
            rng.choice((8, 12, 16)),
            rng.randint(1, 3),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("seed", "layers", "devices", "batch", "size"), _instances(4, 25))
def test_close_to_the_best_contiguous_plan(
    seed: int, layers: int, devices: int, batch: int, size: int
) -> None:
    """Without baselines and without the exact mode, at most 2 % above the best plan."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, layers), random_cluster(rng, devices)
    best = brute_force(profile, cluster, batch, size)
    assert best is not None
    plan = search(profile, cluster, batch, micro_batch_size=size, warmup="A", options=ALONE).plan
    assert plan.predicted is not None
    assert plan.predicted.step_seconds <= best[0] * 1.02


@settings(max_examples=60, deadline=None)
@given(profiles(), clusters(), st.integers(1, 9))
def test_neighbours_are_valid_layouts(profile: ModelProfile, cluster: Cluster, batch: int) -> None:
    """Every change keeps all layers, and no device twice."""
    problem = Problem(profile, cluster, batch)
    layout = Layout(
        (0, problem.num_layers), (tuple(range(problem.num_devices)),), problem.micro_batch_counts[0]
    )
    for _ in range(3):
        nearby = neighbours(problem, layout, range(layout.num_stages))
        assert layout not in nearby
        for other in nearby:
            problem.plan(other, other.stages(), "test")
        if nearby:
            layout = nearby[len(nearby) // 2]


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True).map(sorted),
    st.integers(0, 200),
    st.data(),
)
def test_interpolation_of_all_layers_at_once(
    sizes: list[int], rows: int, data: st.DataObject
) -> None:
    """The same figures as the interpolation of one layer."""
    values = st.lists(st.floats(0, 10), min_size=len(sizes), max_size=len(sizes))
    layers = np.array(data.draw(st.lists(values, min_size=1, max_size=3)))
    expected = [seconds_at(sizes, layer, rows) for layer in layers]
    assert all_at(sizes, layers, rows) == pytest.approx(expected)
    expected = [bytes_at(sizes, layer, rows) for layer in layers]
    assert all_bytes_at(sizes, layers, rows) == pytest.approx(expected)


def test_orders_of_devices() -> None:
    """Machine by machine, and one of each machine in turn."""
    assert device_orders(preset("config-a:2x2")) == [(0, 1, 2, 3), (0, 2, 1, 3)]
    assert device_orders(preset("config-b")) == [tuple(range(16))]


def test_frame_of_two_machines() -> None:
    """Devices may be left idle up to the next machine, and equal stages are found to be equal."""
    cluster = preset("config-a:2x2")
    problem = Problem(random_profile(random.Random(1), 4), cluster, 8)
    frame = make_frame(cluster, problem.symmetry, (0, 1, 2, 3), 1)
    assert frame.sources == ((), (), (0, 1), (), (2, 3))
    assert [len(devices) for devices in frame.stages] == [1, 2, 3, 4]
    assert frame.kind[0].tolist() == [0, 1, 2, 3]
    assert frame.kind[3].tolist() == [0, -1, -1, -1]
    inside, across = frame.link[1, 0], frame.link[2, 0]
    assert frame.links[inside] == ((0,), (1,))
    assert frame.links[across] == ((1,), (2,))
    assert frame.link[3, 0] == inside


def test_steps_grow_with_the_cluster() -> None:
    """Small clusters are searched device by device, large ones in blocks."""
    assert choose_step(16, 1024) == 1
    assert choose_step(200, 1) == 1
    assert choose_step(1024, 1024) > 8


def test_marks_keep_the_cheap_cuts() -> None:
    """With more layers than marks, the cheapest cut of each part of the model stays."""
    profile = random_profile(random.Random(2), 200)
    problem = Problem(profile, preset("config-a"), 8)
    marks = choose_marks(problem.tables(8), 40)
    assert marks[0] == 0
    assert marks[-1] == 200
    assert 30 <= len(marks) <= 42
    assert (np.diff(marks) > 0).all()
    crossing = problem.layer_tables.crossing_bytes.forward.per_row
    assert crossing[marks[1:-1]].mean() < 0.5 * crossing[1:-1].mean()


@pytest.mark.parametrize("seed", [3, 4])
def test_exploring_finds_no_worse_layouts(seed: int) -> None:
    """Uphill and best first, from an even pipeline: valid layouts of other lengths, the best no worse."""
    rng = random.Random(seed)
    problem = Problem(random_profile(rng, 16), random_cluster(rng, 8), 64)
    layout = Layout((0, 4, 8, 12, 16), ((0, 1), (2, 3), (4, 5), (6, 7)), 16)
    begin = guess_seconds(problem, layout)
    assert begin is not None
    for found in ([*uphill(problem, layout)], [*best_first(problem, [layout])]):
        guesses = [guess_seconds(problem, other) for other in found]
        assert min(guess for guess in guesses if guess is not None) <= begin
        assert len({other.num_stages for other in found}) > 1
        for other in found:
            problem.plan(other, other.stages(), "test")
    assert {other.micro_batches for other in best_first(problem, [layout])} == {16}


@pytest.mark.parametrize("seed", [0, 1, 2, 24])
def test_no_cut_a_layer_further_is_faster(seed: int) -> None:
    """The plan's own cuts are the best of those around them, in the simulator."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, 14), random_cluster(rng, 6)
    options = SearchOptions(exact=False)
    plan = search(profile, cluster, 16, micro_batch_size=2, warmup="A", options=options).plan
    problem = Problem(profile, cluster, 16, micro_batch_size=2, warmup="A")
    bounds = (*(stage.start for stage in plan.stages), profile.num_layers)
    devices = tuple(stage.devices for stage in plan.stages)
    assert plan.predicted is not None
    for other in shifted_cuts(Layout(bounds, devices, plan.num_micro_batches, "A")):
        stages = problem.fit(other, "test")
        if not isinstance(stages, Refusal):
            seconds = problem.step_seconds(stages, plan.num_micro_batches)
            assert seconds >= plan.predicted.step_seconds * (1 - 1e-9)


def test_nothing_is_looked_for_where_the_bound_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without gradients to add up nothing is faster than data parallelism, which scouting finds."""
    looked: list[int] = []
    monkeypatch.setattr(GeneralSearch, "_look_closely", lambda *_: looked.append(1))
    layers = tuple(
        LayerProfile(
            name=f"l{n}", forward_seconds=(1.0,), backward_seconds=(2.0,), parameter_bytes=0
        )
        for n in range(32)
    )
    profile = ModelProfile(model="m", device="d", batch_sizes=(1,), layers=layers)
    plan = search(profile, preset("config-a:1x4"), 32, micro_batch_size=4, options=ALONE).plan
    assert plan.num_stages == 1
    assert not looked
