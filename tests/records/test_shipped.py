"""The profiles that come with dapple, against the authors' own where their files are at hand."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from dapple.cluster import preset
from dapple.costs import CostModel, stage_memory
from dapple.records import ModelProfile, StagePlan
from dapple.records.shipped import shipped_models, shipped_profile

SHARED = Path(__file__).parents[2].parent / "shared" / "profiles"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the profiles of ../shared are not in this checkout"
)
DEVICE = "v100-16gb"
FLOAT = 4
_NODE = re.compile(
    r"node\d+ -- (\S+) -- forward_compute_time=([\d.]+), backward_compute_time=([\d.]+), "
    r"activation_size=([\d.]+)"
)


def shipped(model: str) -> ModelProfile:
    found = shipped_profile(model, DEVICE)
    assert found is not None
    return found


def authors(name: str) -> list[tuple[str, float, float, float]]:
    """(name, forward ms, backward ms, activation bytes) of each node but the data pipeline's."""
    text = (SHARED / f"{name}.txt").read_text()
    nodes = [(n, float(f), float(b), float(a)) for n, f, b, a in _NODE.findall(text)]
    return [node for node in nodes if node[0] != "Input"]


def boundaries(profile: ModelProfile, rows: int) -> list[float]:
    """Bytes over the cut after each layer but the last."""
    return [
        sum(
            t.bytes_per_sample * rows + t.fixed_bytes
            for t in profile.tensors
            if 0 <= t.producer <= layer < max(t.consumers)
        )
        for layer in range(profile.num_layers - 1)
    ]


def test_models_of_the_paper_have_a_profile_for_its_device():
    """As many layers as the paper's plans count, and what is before and after them."""
    counts = {name: shipped(name).num_layers for name in shipped_models(DEVICE)}
    assert counts == {
        "bert-48": 50,
        "bert-large": 26,
        "vgg-19": 19,
        "xlnet-36": 38,
        "gnmt-16": 20,
        "resnet-50": 18,
        "amoebanet-36": 42,
    }


def test_an_unknown_model_or_device_has_none():
    """Which says that it has to be made."""
    assert shipped_profile("bert-48", "h100") is None
    assert shipped_profile("gpt", DEVICE) is None


@needs_shared
@pytest.mark.parametrize(
    ("model", "file", "rows"),
    [
        ("bert-48", "bert-48-pbs-2", 2),
        ("vgg-19", "vgg-19-pbs-32", 32),
        ("xlnet-36", "xlnet-36-pbs-1", 1),
    ],
)
def test_forward_and_backward_are_within_a_quarter_of_the_authors(model, file, rows):
    """Of all layers together."""
    profile, nodes = shipped(model), authors(file)
    at = profile.batch_sizes.index(rows)
    forward = 1e3 * sum(layer.forward_seconds[at] for layer in profile.layers)
    backward = 1e3 * sum(layer.backward_seconds[at] for layer in profile.layers)
    assert forward == pytest.approx(sum(f for _, f, _, _ in nodes), rel=0.25)
    assert backward == pytest.approx(sum(b for _, _, b, _ in nodes), rel=0.25)


@needs_shared
def test_boundary_activations_are_within_a_tenth_of_the_authors():
    """BERT's file adds the mask to each layer's output, which dapple computes where it is read."""
    mask = 2 * 384 * 384 * FLOAT
    blocks = boundaries(shipped("bert-48"), 2)
    file = [a - mask for n, _, _, a in authors("bert-48-pbs-2") if n.startswith("layer_")]
    assert blocks[1:] == pytest.approx(file, rel=1e-6)

    blocks = boundaries(shipped("xlnet-36"), 1)
    file = [a for n, _, _, a in authors("xlnet-36-pbs-1") if n.startswith("Layer_")]
    assert blocks[1:] == pytest.approx(file, rel=0.1)

    nodes = authors("vgg-19-pbs-32")
    file = [
        after[3] if after[0].startswith("MaxPool") else node[3]
        for node, after in itertools.pairwise(nodes)
        if not node[0].startswith(("MaxPool", "Prediction"))
    ]
    assert boundaries(shipped("vgg-19"), 32) == pytest.approx(file, rel=0.1)


@pytest.mark.parametrize(
    ("model", "rows", "gigabytes"),
    [("bert-48", 2, 11.4), ("xlnet-36", 1, 12.0), ("vgg-19", 32, 5.6)],
)
def test_memory_at_the_papers_batch_is_within_a_fifth_of_its_table(model, rows, gigabytes):
    """The whole model on one device with Adam, one micro-batch."""
    profile = shipped(model)
    stage = StagePlan(start=0, stop=profile.num_layers, devices=(0,), warmup=1)
    costs = CostModel(profile, preset("config-b"))
    memory = stage_memory(costs, [stage], 0, rows, 1)
    assert memory is not None
    assert memory.total == pytest.approx(gigabytes * 1e9, rel=0.2)
