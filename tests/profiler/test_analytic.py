"""Analytic profiles: bytes as measured, seconds as the roofline says, and no memory for weights."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from dapple.cluster import device_kind
from dapple.errors import InputError
from dapple.graph import capture
from dapple.graph.fake import Fakes, is_fake, weightless
from dapple.profiler import measure_profile
from dapple.profiler.analytic import analytic_profile
from dapple.profiler.lstm import lstm_seconds
from dapple.profiler.roofline import Roofline
from dapple.records import ModelProfile
from dapple.records.shipped import shipped_profile
from dapple.workload import Workload
from dapple.zoo import VGG, make_workload, mean_squared_error
from tests.zoo.sizes import SMALL

V100 = device_kind("v100-16gb")
FLOAT = 4


def zoo(name: str) -> functools.partial[Workload]:
    return functools.partial(make_workload, name, **SMALL[name])


def measured(workload: Workload, sizes: tuple[int, ...]) -> ModelProfile:
    graph = capture(
        workload.model, workload.inputs(2), loss=workload.loss, name=workload.name, evaluation=False
    )
    return measure_profile(graph, workload, batch_sizes=sizes, rounds=1)


@pytest.mark.parametrize("name", ["gpt", "resnet-50"])
def test_bytes_tensors_and_ties_are_those_of_a_measured_profile(name):
    """Without a number computed; the model is the same one to a plan."""
    sizes = (2, 3)
    here = measured(zoo(name)(), sizes)
    shapes = analytic_profile(zoo(name), "v100-16gb", batch_sizes=sizes)
    assert shapes.tensors == here.tensors
    assert shapes.tied == here.tied
    assert shapes.model_fingerprint == here.model_fingerprint
    for ours, theirs in zip(shapes.layers, here.layers, strict=True):
        assert ours.name == theirs.name
        assert ours.parameter_sizes == theirs.parameter_sizes
        assert ours.saved_bytes == theirs.saved_bytes
        assert ours.workspace_bytes == theirs.workspace_bytes


def test_a_weightless_model_has_no_numbers_and_keeps_its_ties():
    """Neither while it is built nor when it is captured."""
    with weightless():
        large, tied = VGG(), make_workload("gpt", **SMALL["gpt"]).model
    assert all(p.device.type == "meta" for p in large.parameters())
    Fakes(tied)
    assert tied.head.weight is tied.embed.weight
    assert is_fake(tied.head.weight)
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_what_is_shipped_is_what_is_computed_now():
    """VGG-19 at its true size: a change of the model or of the roofline shows here."""
    now = analytic_profile(lambda: make_workload("vgg-19"), "v100-16gb", batch_sizes=(2,))
    kept = shipped_profile("vgg-19", "v100-16gb")
    assert kept is not None
    at = kept.batch_sizes.index(2)
    assert now.model_fingerprint == kept.model_fingerprint
    assert now.tensors == kept.tensors
    for new, old in zip(now.layers, kept.layers, strict=True):
        assert new.forward_seconds == (old.forward_seconds[at],)
        assert new.backward_seconds == (old.backward_seconds[at],)
        assert old.saved_bytes is not None
        assert new.saved_bytes == (old.saved_bytes[at],)


def _linear(inputs: int, outputs: int) -> Workload:
    return Workload(
        name="linear",
        model=nn.Sequential(nn.Linear(inputs, outputs, bias=False)),
        inputs=lambda rows: torch.ones(rows, inputs),
        targets=lambda rows: torch.ones(rows, outputs),
        loss=mean_squared_error,
    )


def test_a_large_product_takes_its_operations_at_the_stated_speed():
    """2 m n k over peak times efficiency, within the loss of the last wave of tiles."""
    roofline = Roofline("v100-16gb")
    wanted = 2 * 8192 * 4096**2 / (V100.flops * roofline.efficiencies.product)
    assert wanted <= roofline.product(8192, 4096, 4096, 0.0) <= 1.05 * wanted
    forward = analytic_profile(lambda: _linear(4096, 4096), "v100-16gb", batch_sizes=(8192,))
    seconds = forward.layers[0].forward_seconds[0]
    error = roofline.memory(3 * 8192 * 4096 * FLOAT)
    assert wanted <= seconds <= 1.05 * wanted + error
    # The input needs no gradient: one product, of the weights.
    backward = forward.layers[0].backward_seconds[0]
    assert wanted <= backward <= 1.05 * wanted + 3 * error


def test_a_product_of_few_rows_is_bound_by_the_weights_it_reads():
    """The small-batch floor: eight rows cost less than twice what one costs."""
    profile = analytic_profile(lambda: _linear(4096, 4096), "v100-16gb", batch_sizes=(1, 8))
    one, eight = profile.layers[0].forward_seconds
    read = 4096**2 * FLOAT / (V100.memory_bandwidth * Roofline("v100-16gb").efficiencies.bandwidth)
    assert read < one <= eight < 2 * read


def test_half_a_wave_of_tiles_takes_as_long_as_a_whole_one():
    """80 processors: 40 tiles of 64 x 64 leave half of them idle."""
    roofline = Roofline("v100-16gb")
    half, whole = (roofline.product(64 * tiles, 64, 128, 0.0) for tiles in (40, 80))
    assert half == pytest.approx(whole)


def test_a_winograd_convolution_multiplies_less_than_its_definition_says():
    """3 x 3 with stride 1 exceeds the peak in single precision, and not on tensor cores."""
    single, half = Roofline("v100-16gb"), Roofline("v100-16gb", "float16")
    plain = single.convolution(10**5, 512, 4608, 0.0, winograd=False)
    assert single.convolution(10**5, 512, 4608, 0.0, winograd=True) < plain / 2
    assert half.convolution(10**5, 512, 4608, 0.0, winograd=True) == half.convolution(
        10**5, 512, 4608, 0.0, winograd=False
    )


class Recurrent(nn.Module):
    def __init__(self, both_ways: bool, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 8, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(16 if both_ways else 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize(("both_ways", "layers"), [(False, 1), (True, 1), (True, 2)])
def test_an_lstm_runs_its_steps_one_after_the_other_and_keeps_gates_and_cells(both_ways, layers):
    """Per direction: four gates and a cell for each step and row, and each layer's output."""
    steps, rows = 5, 3
    profile = analytic_profile(
        lambda: Workload(
            name="recurrent",
            model=Recurrent(both_ways, layers),
            inputs=lambda rows: torch.ones(rows, steps, 12),
            targets=lambda rows: torch.ones(rows, steps, 2),
            loss=mean_squared_error,
        ),
        "v100-16gb",
        batch_sizes=(rows,),
    )
    ways = 2 if both_ways else 1
    lstm = profile.layers[0]
    assert lstm.saved_bytes == (FLOAT * rows * steps * layers * ways * 8 * (5 + 1),)
    roofline = Roofline("v100-16gb")
    inputs = [12, 16][:layers]
    for found, backward in [(lstm.forward_seconds[0], False), (lstm.backward_seconds[0], True)]:
        wanted = ways * sum(
            lstm_seconds(roofline, steps, rows, i, 8, FLOAT, backward) for i in inputs
        )
        assert wanted * 0.999 <= found <= wanted + 10 * roofline.memory(rows * steps * 100 * FLOAT)
        assert wanted > 2 * steps * roofline.efficiencies.launch_seconds


def test_a_device_is_profiled_in_the_type_it_is_trained_in():
    """Half the bytes in bfloat16, and faster; float32 on request."""
    half = analytic_profile(zoo("mlp"), "a100-80gb", batch_sizes=(2,))
    full = analytic_profile(zoo("mlp"), "a100-80gb", batch_sizes=(2,), dtype="float32")
    assert (half.dtype, full.dtype) == ("bfloat16", "float32")
    assert full.layers[0].parameter_bytes == 2 * half.layers[0].parameter_bytes
    assert Roofline("h100").product(4096, 4096, 4096, 0.0) < Roofline("a100-80gb").product(
        4096, 4096, 4096, 0.0
    )


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        ("tpu", None, 'device "tpu" is unknown; known: v100-16gb'),
        ("v100-16gb", "bfloat16", 'no peak speed of v100-16gb is known for "bfloat16"'),
    ],
)
def test_an_unknown_device_or_type_is_refused(device, dtype, words):
    with pytest.raises(InputError) as caught:
        analytic_profile(zoo("mlp"), device, dtype=dtype)
    assert words in str(caught.value)
