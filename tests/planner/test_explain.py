"""The explanation of a plan says what binds it and what else there was, in checkable numbers."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.errors import MemoryPlanError
from dapple.planner import SearchOptions, search
from dapple.planner.explain import Explanation, explain
from dapple.planner.problem import Problem
from dapple.records import LayerProfile, ModelProfile, TensorProfile
from tests.planner.strategies import clusters, profiles


def _profile(seconds: list[float], parameters: int = 1000, message: float = 8.0) -> ModelProfile:
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            forward_seconds=(t,),
            backward_seconds=(2 * t,),
            parameter_bytes=parameters,
            saved_bytes=(1000,),
        )
        for i, t in enumerate(seconds)
    )
    tensors = tuple(
        TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), bytes_per_sample=message)
        for i in range(len(seconds) - 1)
    )
    return ModelProfile(model="m", device="d", batch_sizes=(1,), layers=layers, tensors=tensors)


def _cluster(devices: int, memory: int = 10**9, bandwidth: float = 1e9) -> Cluster:
    group = Machines(
        devices=devices,
        kind=DeviceKind(name="d", memory=memory),
        inside=Link(bandwidth=bandwidth),
    )
    return Cluster(name="c", machines=(group,))


def _explained(profile: ModelProfile, cluster: Cluster, batch: int = 8, **options) -> Explanation:
    result = search(profile, cluster, batch, **options)
    options.pop("planner", None)
    return explain(result, profile, Problem(profile, cluster, batch, **options))


def test_the_heavy_stage_binds():
    """Of a straight pipeline with one slow layer, the stage with that layer is named first."""
    found = _explained(_profile([1.0, 5.0, 1.0]), _cluster(3), planner="straight")
    assert found.binding[0].startswith("compute of stage 1 (layers 1-1, layer1)")


def test_slow_links_bind():
    """Where a message takes longer than the layers, the transfers across that cut come first."""
    profile = _profile([0.01, 0.01], message=1e6)
    found = _explained(profile, _cluster(2, bandwidth=1e6), planner="straight")
    assert found.binding[0].startswith("transfers between stages 0 and 1 (cut after layer0)")


def test_large_gradients_bind_data_parallelism():
    """With heavy parameters the AllReduce is what the step of data parallelism depends on."""
    profile = _profile([0.01] * 4, parameters=10**8)
    found = _explained(profile, _cluster(2, bandwidth=1e9, memory=10**10), planner="dp")
    assert found.binding[0].startswith("AllReduce of gradients")


def test_memory_that_cuts_the_warm_up_is_told():
    """Two micro-batches do not fit stage 0, so it says how many do."""
    profile = _profile([1.0, 1.0], parameters=100)
    found = _explained(profile, _cluster(2, memory=3000), planner="straight", micro_batch_size=2)
    assert any("memory of stage 0" in text and "hold 1" in text for text in found.binding)


def test_alternatives_are_never_better_than_the_best_plan():
    """Every alternative that exists takes at least as long, and one stage fewer is among them."""
    found = _explained(_profile([1.0, 2.0, 3.0, 2.0], parameters=10**8), _cluster(4))
    steps = {a.name: a.step_seconds for a in found.alternatives}
    assert {"dp", "one stage fewer", "one stage more"} <= set(steps)
    known = [s for s in steps.values() if s is not None]
    assert known
    assert min(known) >= found.step_seconds * (1 - 1e-9)


def test_a_refused_alternative_says_why():
    """Data parallelism that does not fit is listed with its bytes."""
    profile = _profile([1.0, 1.0], parameters=10**6)
    found = _explained(profile, _cluster(2, memory=5 * 10**6))
    (dp,) = [a for a in found.alternatives if a.name == "dp"]
    assert dp.step_seconds is None
    assert "needs" in dp.reason


def test_a_single_stage_has_no_fewer():
    """One layer on one device has no neighbours at all."""
    found = _explained(_profile([1.0]), _cluster(1))
    assert [a.step_seconds for a in found.alternatives if a.name.startswith("one stage")] == [
        None,
        None,
    ]
    assert "it has one stage" in str(found)


def test_the_command_line_explains(tmp_path, capsys, monkeypatch):
    """`dapple plan --explain` prints it under the plan."""
    from dapple.cli.main import run

    _profile([1.0, 2.0]).save(tmp_path / "p.json")
    arguments = [
        "dapple",
        "plan",
        "--profile",
        str(tmp_path / "p.json"),
        "--cluster",
        "config-a:1x2",
    ]
    monkeypatch.setattr("sys.argv", [*arguments, "--global-batch-size", "4", "--explain"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    assert "instead of it:" in capsys.readouterr().out


def test_a_step_that_takes_no_time_is_explained():
    """Nothing binds it, and there are no ratios to it."""
    found = _explained(_profile([0.0, 0.0], parameters=0, message=0.0), _cluster(2))
    assert found.binding == ("nothing in particular",)
    assert "dp: 0 us (1 micro-batches)" in str(found)


def test_alternatives_may_save_memory_as_the_plan_may():
    """Two layers fit on a device, four only where two replicas share out the optimizer's state."""
    profile, cluster = _profile([1.0] * 4, parameters=10**8), _cluster(2, memory=13 * 10**8)
    steps = [
        {other.name: other.step_seconds for other in found.alternatives}["one stage fewer"]
        for found in (
            _explained(profile, cluster, planner="straight", shard=shard) for shard in (False, True)
        )
    ]
    assert steps[0] is None
    assert steps[1] is not None


def _never_faster(profile: ModelProfile, cluster: Cluster, batch: int, shard: bool = False):
    options = SearchOptions(certificate=False, exact=False, baselines=False)
    result = search(profile, cluster, batch, shard=shard, options=options)
    found = explain(result, profile, Problem(profile, cluster, batch, shard=shard))
    steps = [a.step_seconds for a in found.alternatives if a.step_seconds is not None]
    assert min(steps, default=math.inf) >= found.step_seconds * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(profiles(max_layers=8), clusters(max_devices=7), st.integers(1, 16), st.booleans())
def test_nothing_told_is_faster_than_the_plan(
    profile: ModelProfile, cluster: Cluster, batch: int, shard: bool
):
    """On odd clusters the search has looked at everything that is told, and taken what is faster."""
    with contextlib.suppress(MemoryPlanError):
        _never_faster(profile, cluster, batch, shard)


def test_an_idle_device_between_others_is_put_in():
    """Two machines with unlike cards: an outsider's problem, where one stage more was faster."""
    forward, backward = [1.0, 3.3, 0.0, 0.0, 3.3, 1.0], [0.0, 2.0, 4.0, 30.0, 4.0, 30.0]
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            forward_seconds=(forward[i] / 1000,),
            backward_seconds=(backward[i] / 1000,),
            parameter_bytes=size,
        )
        for i, size in enumerate([2**31, 100 * 2**20, 2**20, 20 * 2**20, 4, 0])
    )
    reach = [(1, 5), (2, 4), (4, 5), (4,), (5,)]
    tensors = tuple(
        TensorProfile(name=f"t{i}", producer=i, consumers=reach[i], bytes_per_sample=size)
        for i, size in enumerate([1e7, 1e7, 1e5, 1e3, 1e7])
    )
    profile = ModelProfile(model="m", device="d", batch_sizes=(1,), layers=layers, tensors=tensors)
    kind = DeviceKind(name="d", memory=80 * 2**30)
    card = Link(bandwidth=1e10, latency=1e-3, flow_bandwidth=5e8, allreduce_bandwidth=2e9)
    near = Link(bandwidth=1e10, latency=1e-4)
    two = Machines(devices=2, kind=kind, inside=near, outside=card)
    six = Machines(devices=6, kind=kind, inside=Link(bandwidth=1e9), outside=Link(bandwidth=1e8))
    _never_faster(profile, Cluster(name="odd", machines=(two, six), network_model="paper"), 8)
