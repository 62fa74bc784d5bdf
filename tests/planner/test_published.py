"""PipeDream's, HPGO's and torchgpipe's planners: each the best for its own objective."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.planner.released import Answer, package_chain, recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, preset
from dapple.errors import PlanError
from dapple.planner import PLANNERS, search
from dapple.planner.hpgo import BatchCosts, hpgo, released_network, released_search
from dapple.planner.pipedream import Level, find_levels, most_places, plan_hierarchy
from dapple.planner.problem import Problem
from dapple.planner.published import LayerCosts, leading_inputs
from dapple.planner.torchgpipe import block_partition, scaled
from dapple.records import LayerProfile, ModelProfile
from dapple.records.text_profile import load_text_profile
from dapple.simulator import simulate
from tests.planner.strategies import clusters, profiles

PROFILES = Path(__file__).parents[3] / "shared" / "profiles"

_AMOUNTS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 7.0]), min_size=5, max_size=5)


def _costs(seconds: list[float], weights: list[float], moved: list[float]) -> LayerCosts:
    return LayerCosts(
        np.arange(len(seconds) + 1),
        np.concatenate([[0.0], np.cumsum(seconds)]),
        np.concatenate([[0.0], np.cumsum(weights)]),
        np.array([0.0, *moved]),
        np.zeros(len(seconds) + 1),
    )


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise([0, *cuts, total]))


def _slowest(costs: LayerCosts, levels: tuple[Level, ...], start: int, stop: int) -> float:
    """PipeDream's objective by trying everything, straight from the paper's words."""
    if not levels:
        return float(costs.seconds[stop] - costs.seconds[start])
    *inner, level = levels
    best = np.inf
    for stages in range(1, min(stop - start, level.components) + 1):
        for widths in _compositions(stop - start, stages):
            bounds = [start, *(start + sum(widths[: n + 1]) for n in range(stages))]
            moved = [costs.activation_bytes[b] / level.flow_rate for b in bounds[1:-1]]
            for replicas in _compositions(level.components, stages):
                worst = max(moved, default=0.0)
                for a, b, m in zip(bounds, bounds[1:], replicas, strict=False):
                    weights = costs.parameter_bytes[b] - costs.parameter_bytes[a]
                    alone = _slowest(costs, tuple(inner), a, b)
                    reduce = 2 * (m - 1) * weights / level.reduce_rate
                    worst = max(worst, max(alone, reduce) / m)
                best = min(best, worst)
    return float(best)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    _AMOUNTS,
    _AMOUNTS,
    _AMOUNTS,
    st.sampled_from([(1,), (2,), (4,), (2, 2), (3, 2), (2, 3)]),
    st.sampled_from([0.5, 4.0]),
)
def test_pipedream_is_the_best_of_its_own_objective(
    layers: int,
    seconds: list[float],
    weights: list[float],
    moved: list[float],
    counts: tuple[int, ...],
    outside: float,
) -> None:
    """The dynamic programme gives what trying every hierarchy gives, and uses every device."""
    costs = _costs(seconds[:layers], weights[:layers], [*moved[: layers - 1], 0.0])
    rates = (8.0, outside)
    levels = tuple(Level(n, r, r / 2) for n, r in zip(counts, rates, strict=False))
    found, stages = plan_hierarchy(costs, levels)
    assert found == pytest.approx(_slowest(costs, levels, 0, layers))
    assert [s.start for s in stages] == [0, *(s.stop for s in stages[:-1])]
    assert stages[-1].stop == layers
    devices = sorted(device for stage in stages for device in stage.devices)
    assert devices == list(range(int(np.prod(counts))))


def test_pipedream_replicates_an_inner_pipeline_over_machines() -> None:
    """A pipeline inside each machine, replicated over machines, pairs equal places of machines."""
    costs = _costs([1.0, 1.0], [100.0, 100.0], [0.1, 0.0])
    levels = (Level(2, 1.0, 1.0), Level(2, 0.001, 1e6))
    _, stages = plan_hierarchy(costs, levels)
    assert [stage.devices for stage in stages] == [(0, 2), (1, 3)]


def test_pipedreams_levels() -> None:
    """Levels of one component are left out; unequal machines make one level."""
    (inside, outside) = find_levels(preset("config-a:4x8"))
    assert (inside.components, inside.flow_rate, inside.reduce_rate) == (8, 40e9, 130e9)
    assert (outside.components, outside.flow_rate, outside.reduce_rate) == (4, 0.8e9, 3.0e9)
    assert [level.components for level in find_levels(preset("config-b"))] == [16]
    assert [level.components for level in find_levels(preset("config-a:1x8"))] == [8]
    assert [level.components for level in find_levels(preset("config-a:1x1"))] == [1]
    groups = preset("config-a:1x2").machines + preset("config-a:1x3").machines
    assert [level.components for level in find_levels(Cluster(name="odd", machines=groups))] == [5]


def test_pipedream_looks_at_fewer_cuts_where_there_are_many_devices() -> None:
    """The work is bounded whatever the cluster."""
    assert most_places(find_levels(preset("config-a"))) >= 60
    assert 2 <= most_places(find_levels(preset("config-b:1024x1"))) < 20


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.data())
def test_torchgpipes_blocks_differ_by_one_at_most(costs: list[float], data: st.DataObject) -> None:
    """Its objective: of costs scaled to 0..1, no block's sum exceeds another's by more than 1."""
    parts = data.draw(st.integers(1, len(costs)))
    stops = block_partition(costs, parts)
    assert len(stops) == parts
    assert stops[-1] == len(costs)
    assert stops == sorted(stops)
    sizes = scaled(costs)
    sums = [sum(sizes[a:b]) for a, b in itertools.pairwise([0, *stops])]
    assert max(sums) <= min(sums) + 1 + 1e-8


def _exhaustive(costs: BatchCosts, cluster: Cluster) -> float:
    """The score of every plan in HPGO's two-stage and data parallel families, one by one."""
    group, count, n = cluster.machines[0], cluster.num_devices, len(costs.seconds) - 1
    assert group.outside is not None
    machine = cluster.machine_of_device()
    flow, ring = group.outside.flow_bandwidth, group.outside.allreduce_bandwidth
    assert flow is not None
    assert ring is not None
    assert group.inside.allreduce_bandwidth is not None

    def reduce(devices: tuple[int, ...], size: float) -> float:
        rate = group.inside.allreduce_bandwidth or 1.0
        if len({machine[d] for d in devices}) > 1:
            rate = min(rate, ring) if len(devices) > len({machine[d] for d in devices}) else ring
        return 2 * (len(devices) - 1) / len(devices) * size / rate

    def transfer(size: float, senders: tuple[int, ...], receivers: tuple[int, ...]) -> float:
        targets = {machine[d] for d in receivers}
        if len(targets) > 1:
            return size / ring
        far = sum(machine[d] not in targets for d in senders)
        return size * far / len(senders) / flow if far else size / group.inside.bandwidth

    total, held = costs.seconds[-1], costs.parameter_bytes
    best = np.inf
    for ways in range(min(2, count), count + 1):
        copies = count // ways
        micro_batches = max(1, costs.rows // copies)
        work = total / (ways * copies) / micro_batches * (micro_batches - 1)
        late = reduce(tuple(range(ways * copies)), held[-1])
        best = min(best, work + total / copies / micro_batches + late)
    for width, cut in itertools.product(range(1, count), range(1, n)):
        by_turn = sorted(range(count), key=lambda d: (d % group.devices, machine[d]))
        for first in (tuple(range(width)), tuple(sorted(by_turn[:width]))):
            second = tuple(d for d in range(count) if d not in first)
            moved = transfer(costs.crossing_bytes[cut], first, second)
            sides = costs.seconds[cut] / width, (total - costs.seconds[cut]) / (count - width)
            block = max(*sides, moved) / costs.rows
            until = held[min(cut + 1, n)] if costs.slip else held[cut]
            late = max(0.0, reduce(first, until), reduce(second, held[-1] - held[cut]) - block)
            score = block * (costs.rows - 1) + (total + moved) / costs.rows + late
            best = min(best, score)
    return float(best)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5),
    _AMOUNTS,
    _AMOUNTS,
    _AMOUNTS,
    st.sampled_from(["config-a:1x2", "config-a:2x2", "config-a:2x3", "config-b:4x1"]),
    st.booleans(),
)
def test_hpgo_is_the_best_of_its_own_space(
    layers: int,
    seconds: list[float],
    weights: list[float],
    moved: list[float],
    name: str,
    slip: bool,
) -> None:
    """No data parallel or two-stage plan scores better; only the straight family may beat them."""
    cluster = released_network(preset(name))
    costs = BatchCosts(
        np.concatenate([[0.0], np.cumsum(seconds[:layers])]),
        np.concatenate([[0.0], np.cumsum(weights[:layers])]) * 1e9,
        np.array([0.0, *moved[: layers - 1], 0.0]) * 1e9,
        rows=16,
        slip=slip,
    )
    found, best = released_search(costs, cluster), _exhaustive(costs, cluster)
    widths = {len(devices) for devices in found.devices}
    if len(found.devices) <= 2 and found.seconds >= best * (1 - 1e-9):
        assert found.seconds == pytest.approx(best)
    else:
        assert found.seconds < best
        assert len(widths) == 1, "the straight family has equal replicas"


@pytest.mark.skipif(not PROFILES.is_dir(), reason="needs the profiles beside the checkout")
@pytest.mark.parametrize(
    ("model", "rows", "batch", "cluster", "widths", "last"),
    [
        ("vgg-19", 32, 1024, "config-a", [14, 2], ["MaxPool2d_4"]),
        ("vgg-19", 32, 1024, "config-b", [15, 1], ["Conv2d_5_1"]),
        ("vgg-19", 32, 2048, "config-a", [15, 1], ["Conv2d_5_2"]),
        ("vgg-19", 32, 2048, "config-b", [14, 2], ["MaxPool2d_4"]),
        ("bert-48", 2, 64, "config-a", [8, 8], ["layer_23"]),
        ("bert-48", 2, 64, "config-b", [1] * 16, [f"layer_{n}" for n in range(2, 47, 3)]),
        ("xlnet-36", 1, 128, "config-a", [8, 8], ["Layer_17"]),
        ("xlnet-36", 1, 128, "config-b", [8, 8], ["Layer_17"]),
    ],
)
def test_hpgo_gives_the_plans_of_the_released_package(
    model: str, rows: int, batch: int, cluster: str, widths: list[int], last: list[str]
) -> None:
    """Replica counts and the last layer of each stage are those that HPGO 0.9.2 prints."""
    profile = load_text_profile(PROFILES / f"{model}-pbs-{rows}.txt", rows)
    problem = Problem(profile, released_network(preset(cluster)), batch)
    found = [
        (
            [len(d) for d in layout.devices],
            [profile.layers[b - 1].name for b in layout.bounds[1:-1]],
        )
        for layout in hpgo(problem, batch // rows)
    ]
    assert (widths, last) in found


@pytest.mark.skipif(not PROFILES.is_dir(), reason="needs the profiles beside the checkout")
@pytest.mark.parametrize(
    "answer", recorded(), ids=lambda a: f"{a.model}-{a.batch}-{len(a.machines)}x{a.machines[0]}"
)
def test_hpgo_comes_to_the_scores_of_the_released_package(answer: Answer) -> None:
    """Told the chain that the package sees: its plan, devices and cuts, and its speed-up."""
    (path,) = PROFILES.glob(f"{answer.model}-pbs-*.txt")
    chain = package_chain(path, int(path.stem.rsplit("-", 1)[1]), answer.batch)
    where = preset(f"config-a:{len(answer.machines)}x{answer.machines[0]}")
    found = released_search(chain.costs, released_network(where))
    assert tuple(chain.names[cut - 1] for cut in found.cuts[1:-1]) == answer.last
    assert found.devices == answer.devices
    assert chain.costs.seconds[-1] / found.seconds == pytest.approx(answer.score, rel=1e-12)


def test_leading_inputs_are_no_layers() -> None:
    """What neither learns nor is differentiated at the start of a model is its input."""

    def layer(seconds: float, size: int) -> LayerProfile:
        return LayerProfile(
            name="l", forward_seconds=(1.0,), backward_seconds=(seconds,), parameter_bytes=size
        )

    def count(*layers: LayerProfile) -> int:
        return leading_inputs(ModelProfile(model="m", device="d", batch_sizes=(1,), layers=layers))

    assert count(layer(0, 0), layer(0, 0), layer(1, 0), layer(0, 0)) == 2
    assert count(layer(0, 4), layer(0, 0)) == 0
    assert count(layer(0, 0), layer(0, 0)) == 1


@pytest.mark.parametrize("planner", [name for name in PLANNERS if name != "dapple"])
@settings(max_examples=25, deadline=None)
@given(profiles(), clusters(), st.integers(1, 13))
def test_baselines_give_a_valid_plan_or_a_refusal(
    planner: str, profile: ModelProfile, cluster: Cluster, batch: int
) -> None:
    """Whatever the input: a plan that simulates and fits, or a PlanError with the reason."""
    try:
        plan = search(profile, cluster, batch, planner=planner).plan
    except PlanError:
        return
    assert plan.planner == planner
    assert plan.schedule == ("gpipe" if "gpipe" in planner else "early-backward")
    timeline = simulate(plan, profile, spans=False)
    kinds = cluster.kind_of_device()
    used = sorted(device for stage in plan.stages for device in stage.devices)
    for device, peak in zip(used, timeline.peak_bytes, strict=True):
        assert peak is None or peak <= kinds[device].memory
