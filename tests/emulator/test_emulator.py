"""Emulated models: sizes as profiled, waits as profiled, and a run that the simulator foresees."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from dapple.emulator.model import EmulatedModel, clock
from dapple.emulator.scaling import emulated_profile
from dapple.emulator.worker import capture_emulated, emulated_trainer
from dapple.errors import InputError
from dapple.records import ModelProfile, Plan, TensorProfile
from dapple.simulator import simulate
from tests.cli.command import refuses, succeeds
from tests.runtime.threads import OwnCopy, run_threads
from tests.simulator.pipelines import chain, cluster, plan, random_profiles


def timed(action: Any) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


@settings(max_examples=6)
@given(random_profiles(4))
def test_the_capture_has_the_layers_tensors_and_ties_of_the_profile(profile: ModelProfile):
    """Bytes are rounded to whole floats; a tensor with rows and a fixed part becomes two."""
    emulated = emulated_profile(profile, byte_scale=100)
    graph = capture_emulated(emulated)
    assert graph.num_layers == profile.num_layers
    assert not graph.notes
    found = sorted((t.producer, t.consumers, t.bytes_per_row) for t in graph.tensors())
    parts = [
        (t.producer, t.consumers, int(size))
        for t in emulated.tensors
        for size in (t.bytes_per_sample, t.fixed_bytes)
        if size
    ]
    assert found == sorted(parts)
    held = [sum(p.nbytes for p in graph.parameters_of(n).values()) for n in range(graph.num_layers)]
    assert held == [layer.parameter_bytes for layer in emulated.layers]
    assert [{layer for layer, _ in group} for group in graph.tied] == [
        {member.layer for member in group.members} for group in profile.tied
    ]


def test_layers_wait_for_their_rows_forward_and_backward():
    """20 ms and 40 ms a row, three rows."""
    model = EmulatedModel(emulated_profile(chain([0.02, 0.0], [0.04, 0.0])))
    x, outputs = torch.zeros(3, 1), []
    clock.on = True
    try:
        assert 0.055 < timed(lambda: outputs.append(model(x))) < 1
        assert 0.115 < timed(lambda: outputs[0].mean().backward()) < 1
    finally:
        clock.on = False


def test_nothing_waits_while_a_model_is_captured():
    """A capture runs the layers on example rows, which would take a minute here."""
    assert timed(lambda: capture_emulated(emulated_profile(chain([5.0], [5.0])))) < 5


def test_saved_bytes_are_held_from_forward_to_backward():
    """A layer that keeps 4000 bytes a row beside its output."""
    profile = chain([0.0, 0.0], [0.0, 0.0], bytes_per_row=400)
    first, last = profile.layers
    layers = (first.model_copy(update={"saved_bytes": (4400,)}), last)
    emulated = emulated_profile(profile.model_copy(update={"layers": layers}))
    made = EmulatedModel(emulated).layers[0](torch.zeros(5, 1), [])
    kept = made[0].grad_fn.next_functions  # the operator's node is behind the list's
    assert [t.shape for t in made] == [(5, 100)]
    node = made[0].grad_fn
    saved = node.saved_tensors if hasattr(node, "saved_tensors") else kept[0][0].saved_tensors
    assert [t.nbytes for t in saved] == [5 * 4000]


def test_a_run_takes_what_the_simulator_says():
    """Three stages of 2, 1 and 3 replicas, ranks as threads, links that take no time.

    A rough check, for a machine that may be busy; benchmarks/runtime/emulated.py is the fine one.
    """
    profile = emulated_profile(chain([0.006] * 4, [0.012] * 4, bytes_per_row=4))
    where = cluster(6, bandwidth=1e30)
    made = plan([2, 1, 3], 8, 4, where, cuts=[1, 2, 4])
    graph = capture_emulated(profile)
    expected = simulate(made, profile).step_seconds

    def work(transport: Any) -> float:
        trainer = emulated_trainer(
            OwnCopy(graph), profile, made, transport.rank, transport=transport, record=False
        )
        batch = torch.zeros(8, 1)
        trainer.step(batch)
        return min(timed(lambda: trainer.step(batch)) for _ in range(3))

    seconds = max(run_threads(6, work))
    assert expected * 0.98 < seconds < expected * 3


def test_a_run_holds_what_the_simulator_says():
    """Two stages of layers whose gradients are large beside what they keep of a micro-batch."""
    profile = chain([0.0] * 4, [0.0] * 4, bytes_per_row=8000, parameter_bytes=400_000)
    two = {"forward_seconds": (0.0, 0.0), "backward_seconds": (0.0, 0.0)}
    two |= {"saved_bytes": (20_000, 200_000)}
    layers = tuple(layer.model_copy(update=two) for layer in profile.layers)
    changes = {"layers": layers, "batch_sizes": (1, 10)}
    profile = emulated_profile(profile.model_copy(update=changes))
    made = plan([1, 1], 32, 4, cluster(1, 2), cuts=[2, 4])
    graph = capture_emulated(profile)

    def work(transport: Any) -> int:
        trainer = emulated_trainer(
            OwnCopy(graph), profile, made, transport.rank, transport=transport, record=False
        )
        trainer.step(torch.zeros(32, 1))
        with trainer.measure_memory() as meter:
            trainer.step(torch.zeros(32, 1))
        return meter.peak_bytes

    expected = simulate(made, profile).peak_bytes
    # A message more or less is under way at the peak from one run to the next.
    assert run_threads(2, work) == pytest.approx(expected, rel=0.1)


def test_a_sharded_update_waits_for_its_share():
    """Two replicas of layers with 8000, 4000 and 4000 bytes: half of 3 x 0.2 s each."""
    profile = chain([0.0] * 3, [0.0] * 3, parameter_bytes=4000, optimizer_seconds=0.2)
    layers = list(profile.layers)
    layers[0] = layers[0].model_copy(update={"parameter_bytes": 8000})
    profile = emulated_profile(profile.model_copy(update={"layers": tuple(layers)}))
    made = plan([2], 2, 1, cluster(1, 2), cuts=[3])
    stages = (made.stages[0].model_copy(update={"shard": "optimizer"}),)
    made = made.model_copy(update={"stages": stages})
    graph = capture_emulated(profile)

    def work(transport: Any) -> float:
        trainer = emulated_trainer(
            OwnCopy(graph), profile, made, transport.rank, transport=transport, record=False
        )
        return timed(lambda: trainer.step(torch.zeros(2, 1)))

    seconds = max(run_threads(2, work))
    assert 0.298 < seconds < 0.59
    assert simulate(made, profile).step_seconds == pytest.approx(0.3, abs=0.001)


def test_scales_are_positive_numbers():
    """And tensors never vanish."""
    profile = chain([1.0, 1.0], [1.0, 1.0], bytes_per_row=40.0, parameter_bytes=8)
    small = emulated_profile(profile, byte_scale=1e-9, time_scale=0.5)
    assert [t.bytes_per_sample for t in small.tensors] == [4.0]
    assert small.layers[0].parameter_bytes == 4
    assert small.layers[0].forward_seconds == (0.5,)
    with pytest.raises(InputError, match="byte scale is 0"):
        emulated_profile(profile, byte_scale=0)


@pytest.fixture
def files(tmp_path):
    """A profile and a plan for two stages of one and two replicas."""
    tensors = [TensorProfile(name="t", producer=0, consumers=(1,), bytes_per_sample=4000)]
    profile = chain([0.01, 0.01], [0.02, 0.02], tensors=tensors, parameter_bytes=40_000)
    profile.save(tmp_path / "profile.json")
    plan([1, 2], 6, 3, cluster(3)).save(tmp_path / "plan.json")
    return tmp_path


def test_the_command_runs_the_plan_in_processes_and_compares(files):
    """On gloo; the timeline is in the simulator's format."""
    folder = files / "out"
    shown = succeeds(
        "emulate", files / "plan.json", "--profile", files / "profile.json", "--steps", 2,
        "--output", folder,
    )  # fmt: skip
    assert "predicted against measured" in shown
    timeline = json.loads((folder / "timeline.json").read_text())
    kinds = {span["kind"] for span in timeline["spans"]}
    assert {"forward", "backward", "receive"} <= kinds
    assert {span["rank"] for span in timeline["spans"]} == {0, 1, 2}
    assert timeline["step_seconds"] > 3 * 2 * 0.03
    assert Plan.model_validate_json((folder / "plan.json").read_text()).num_devices == 3


def test_what_can_not_be_emulated_is_refused(files):
    """A plan of another model, no steps, and a scale of nothing."""
    chain([1.0], [1.0]).save(files / "other.json")
    arguments = ["emulate", files / "plan.json", "--profile"]
    assert "covers 2 layers" in refuses(*arguments, files / "other.json")
    assert "--steps is 0" in refuses(*arguments, files / "profile.json", "--steps", 0)
    assert "byte scale" in refuses(*arguments, files / "profile.json", "--byte-scale", 0)
