"""What a profile says of a model: bytes exactly, tensors, ties; times only roughly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dapple.errors import InputError
from dapple.graph import CaptureWarning, capture
from dapple.profiler import measure_profile
from dapple.records import ModelProfile
from dapple.workload import Workload
from dapple.zoo import make_workload
from tests.profiler.models import branches, small_mlp

FLOAT = 4


def profiled(workload: Workload, **options: Any) -> ModelProfile:
    graph = capture(
        workload.model, workload.inputs(2), loss=workload.loss, name=workload.name, evaluation=False
    )
    return measure_profile(graph, workload, **{"batch_sizes": (1, 3), "rounds": 1, **options})


def saved(profile: ModelProfile) -> list[tuple[int, ...] | None]:
    return [layer.saved_bytes for layer in profile.layers]


def test_saved_bytes_are_those_that_autograd_keeps():
    """Linear 3-5, GELU | Linear 5-2, squared error; B rows.

    Layer 0 keeps the GELU's input and its output [B, 5], which layer 1 needs and layer 0 made.
    Layer 1 keeps the error's input [B, 2]. Batch, targets and parameters don't count.
    """
    profile = profiled(small_mlp())
    assert saved(profile) == [
        tuple(2 * 5 * FLOAT * rows for rows in (1, 3)),
        tuple(2 * FLOAT * rows for rows in (1, 3)),
    ]
    assert [layer.parameter_bytes for layer in profile.layers] == [
        (3 * 5 + 5) * FLOAT,
        (5 * 2 + 2) * FLOAT,
    ]


def test_a_tensor_that_several_layers_save_counts_once_and_at_its_producer():
    """Layers are first | middle, tanh, add | last.

    `first` keeps a, which `middle` saves. `middle` keeps tanh's output, and the sum that `last`
    saves: what stands between modules belongs to the layer before. `last` keeps the loss's input.
    """
    row = 4 * FLOAT
    profile = profiled(branches(), batch_sizes=(2,))
    assert saved(profile) == [(2 * row,), (2 * (row + row),), (2 * 2 * FLOAT,)]


def skips(profile: ModelProfile) -> list[tuple[str, list[str], float, bool]]:
    """(producer, consumers, bytes per row, gradient) of the tensors that pass over a layer."""
    names = [layer.name for layer in profile.layers]
    return [
        (names[t.producer], [names[c] for c in t.consumers], t.bytes_per_sample, t.needs_grad)
        for t in profile.tensors
        if t.consumers[-1] > t.producer + 1
    ]


def test_tensors_that_skip_layers_name_all_their_readers():
    """The skip net's skip has a gradient, its gate is a bool. Its mask depends on integer inputs
    only, is computed anew where it is read, and crosses no cut.
    """
    profile = profiled(make_workload("skipnet", width=12, layers=6))
    assert skips(profile) == [
        ("blocks.1", ["blocks.2", "blocks.3"], 12 * FLOAT, True),
        ("blocks.1", ["blocks.3"], 12, False),
    ]
    assert all(t.fixed_bytes == 0 for t in profile.tensors)
    assert [t.bytes_per_sample for t in profile.tensors if not t.needs_grad] == [12]


def test_tied_parameters_are_one_group_and_count_in_both_layers():
    """The GPT's embedding and head."""
    profile = profiled(make_workload("gpt", width=16, layers=2, heads=2, context=8))
    (group,) = profile.tied
    assert [member.layer for member in group.members] == [0, profile.num_layers - 1]
    assert {member.parameter for member in group.members} == {"embed.weight"}
    assert group.parameter_bytes == 256 * 16 * FLOAT
    ends = profile.layers[0], profile.layers[-1]
    assert all(layer.parameter_bytes >= group.parameter_bytes for layer in ends)


def test_everything_but_times_is_the_same_in_every_profile():
    """Bytes, tensors, names and the model's fingerprint."""
    zero = {"forward_seconds": (0.0, 0.0), "backward_seconds": (0.0, 0.0), "optimizer_seconds": 0.0}
    first, second = (
        profile.model_copy(
            update={"layers": tuple(layer.model_copy(update=zero) for layer in profile.layers)}
        )
        for profile in (profiled(make_workload("skipnet", layers=3)) for _ in range(2))
    )
    assert first == second
    assert first.model_fingerprint is not None


def test_a_profile_keeps_what_capture_noticed():
    """Rows that depend on each other, for the user to read beside the figures."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=0), nn.Linear(4, 2))
    inputs, targets = (lambda rows: (torch.ones(rows, 4),)), (lambda rows: torch.zeros(rows, 2))
    with pytest.warns(CaptureWarning, match="rows depend on each other"):
        found = profiled(Workload("mixed", model, inputs, targets, nn.functional.mse_loss))
    assert any("rows depend on each other" in note for note in found.notes)


def test_batch_norms_tell_the_bytes_that_their_replicas_add_up():
    """Two numbers per channel, in float32."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    inputs, targets = (lambda rows: (torch.randn(rows, 4),)), (lambda rows: torch.zeros(rows, 2))
    workload = Workload("norms", model, inputs, targets, nn.functional.mse_loss)
    found = profiled(workload, batch_sizes=(2, 3))
    sizes = {layer.name: layer.statistics_bytes for layer in found.layers}
    assert sizes == {"0": (), "1": (2 * 6 * FLOAT,), "2": ()}


def test_times_are_positive_and_grow_with_the_work():
    """A layer 64 times as large takes longer, forward, backward and update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8))
    workload = Workload(
        name="wide",
        model=model,
        inputs=lambda rows: (torch.ones(rows, 8),),
        targets=lambda rows: torch.zeros(rows, 8),
        loss=nn.functional.mse_loss,
    )
    profile = profiled(workload, batch_sizes=(64,), rounds=5)
    small, large, _ = profile.layers
    for field in ("forward_seconds", "backward_seconds"):
        assert 0 < getattr(small, field)[0] < getattr(large, field)[0]
    assert 0 < small.optimizer_seconds < large.optimizer_seconds


def test_measuring_leaves_the_model_as_it_was():
    """Weights, gradients and mode."""
    workload = small_mlp()
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    profiled(workload)
    assert all(torch.equal(before[n], v) for n, v in workload.model.state_dict().items())
    assert all(p.grad is None for p in workload.model.parameters())
    assert workload.model.training


@pytest.mark.parametrize("sizes", [(), (0, 1), (-1,), (2, 1), (1, 1), (1, 2, 2)])
def test_batch_sizes_must_ascend_from_one(sizes: tuple[int, ...]):
    """InputError with what was passed."""
    with pytest.raises(InputError, match="must ascend from at least 1"):
        profiled(small_mlp(), batch_sizes=sizes)


def test_one_process_says_so():
    """Concurrency is the number of processes that measured together."""
    profile = profiled(small_mlp())
    assert (profile.concurrency, profile.source, profile.device) == (1, "measured", "cpu")
    assert profile.dtype == "float32"
