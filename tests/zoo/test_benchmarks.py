"""The models of the paper's evaluation: their sizes, their maths, and that they train in stages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from dapple.workload import Workload
from dapple.zoo import BENCHMARKS, BERT, GNMT, VGG, AmoebaNet, ResNet, XLNet
from dapple.zoo.xlnet import RelativeAttention
from tests.graph.checks import call
from tests.runtime.cases import TOLERANCE, global_error, make_plan
from tests.runtime.threads import TrainingOnly, run_threads, sgd
from tests.zoo.sizes import SMALL

ROWS, MICRO_BATCHES = 7, 3
REPLICAS = (2, 1, 3)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (VGG, 143_667_240),
        (ResNet, 25_557_032),
        (GNMT, 290_711_237),
        (BERT, 334_094_338),
        (lambda: BERT(layers=48), 636_403_714),
        (XLNet, 524_019_714),
        (AmoebaNet, 935_798_248),
    ],
)
def test_parameters_are_counted_as_published(model, count):
    with torch.device("meta"):
        built = model()
    assert sum(p.numel() for p in built.parameters()) == count


def small(name: str) -> Workload:
    torch.manual_seed(5)
    workload = BENCHMARKS[name](**SMALL[name])
    workload.model.double()
    return workload


def one_process(workload: Workload) -> dict[str, Tensor]:
    """Weights after a step over the same micro-batches, one after the other."""
    model = workload.model
    optimizer = sgd(model.parameters())
    whole = workload.inputs(ROWS)
    pieces = zip(
        zip(*(value.tensor_split(MICRO_BATCHES) for value in whole), strict=True),
        workload.targets(ROWS).tensor_split(MICRO_BATCHES),
        strict=True,
    )
    weight = workload.weight or (lambda inputs, targets: len(targets))
    total = weight(whole, workload.targets(ROWS))
    for inputs, targets in pieces:
        loss = workload.loss(call(model, inputs), targets)
        (loss * weight(inputs, targets) / total).backward()
    optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", [n for n in BENCHMARKS if n != "bert-large"])
def test_a_step_in_three_stages_with_unequal_replicas_equals_one_process(name):
    """Parameters and running statistics in float64; bert-large is bert-48 with fewer blocks."""
    workload = small(name)
    graph: LayerGraph = capture(
        workload.model, workload.inputs(3), loss=workload.loss, name=name, evaluation=False
    )
    plan = make_plan(graph, REPLICAS, ROWS, MICRO_BATCHES)

    def work(transport) -> dict[str, Tensor]:
        trainer = Trainer(
            TrainingOnly(graph),
            plan,
            sgd,
            transport=transport,
            device=torch.device("cpu"),
            record=False,
            weight=workload.weight,
        )
        trainer.step(workload.inputs(ROWS), workload.targets(ROWS))
        return trainer.state_dict()

    states = run_threads(plan.num_devices, work)
    assert global_error(states, one_process(small(name))) < TOLERANCE


def test_relative_attention_adds_content_distance_and_segment():
    """Against the sum over pairs of tokens, written out."""
    torch.manual_seed(3)
    width, heads, length = 8, 2, 4
    attention = RelativeAttention(width, heads, 0.0).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, length, width, dtype=torch.float64)
    distances = torch.randn(2 * length, width, dtype=torch.float64)
    segments = torch.tensor([0, 0, 1, 1])
    other = (segments[:, None] != segments[None])[None, None]
    padding = torch.tensor([False, False, False, True])[None, None, None]

    def by_head(values: Tensor) -> Tensor:
        return values.unflatten(-1, (heads, -1))

    queries, keys, values = (
        by_head(p(x[0])) for p in (attention.queries, attention.keys, attention.values)
    )
    places = by_head(attention.places(distances))
    wanted = torch.zeros(length, heads, width // heads, dtype=torch.float64)
    for head in range(heads):
        for i in range(length):
            scores = torch.full((length,), -math.inf, dtype=torch.float64)
            for j in range(length - 1):
                query, segment = queries[i, head], int(segments[i] != segments[j])
                score = (query + attention.content_bias[head, 0]) @ keys[j, head]
                # Row T + j - i of `distances` is that of distance i - j.
                score += (query + attention.place_bias[head, 0]) @ places[length + j - i, head]
                score += (query + attention.segment_bias[head, 0]) @ (
                    attention.segment_keys[head, :, segment]
                )
                scores[j] = score / math.sqrt(width // heads)
            wanted[i, head] = torch.softmax(scores, 0) @ values[:, head]
    found = attention(x, distances, other, padding)
    torch.testing.assert_close(found[0], attention.mix(wanted.flatten(1)))
