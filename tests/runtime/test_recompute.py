"""Recomputation: the same numbers from less memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dapple.costs import CostModel, stage_memory
from dapple.graph import LayerGraph, capture
from dapple.profiler.measured import measure_profile
from dapple.records import Plan
from dapple.runtime.recorder import Recorder
from dapple.runtime.trainer import Trainer
from dapple.workload import Workload
from tests.graph.models import CASES, Dropped
from tests.runtime import cases
from tests.runtime.threads import compute_alone, on_ranks

Ranges = bool | tuple[tuple[int, int], ...]


def recomputing(plan: Plan, *ranges: Ranges) -> Plan:
    """The plan with what each of its stages recomputes."""
    stages = tuple(
        stage.model_copy(update={"recompute": again})
        for stage, again in zip(plan.stages, ranges, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


def trained(
    graph: LayerGraph, plan: Plan, batches: list[tuple[Any, Any]], **arguments: Any
) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Per rank the weights and losses after these batches."""

    def work(trainer: Trainer) -> tuple[dict[str, Tensor], list[float]]:
        losses = [trainer.step(*batch).loss for batch in batches]
        return {n: v.clone() for n, v in trainer.state_dict().items()}, losses

    return on_ranks(graph, plan, work, cases.OPTIMIZERS["adamw"], **arguments)


def assert_same(one: list[Any], other: list[Any]) -> None:
    """Bitwise, on every rank."""
    for (state, losses), (its, its_losses) in zip(one, other, strict=True):
        assert losses == its_losses
        assert all(torch.equal(value, its[name]) for name, value in state.items())


@pytest.mark.parametrize("schedule", ["early-backward", "gpipe"])
@pytest.mark.parametrize("name", list(cases.EXAMPLES))
def test_weights_and_losses_are_those_without_it(name: str, schedule: str) -> None:
    """Whole stages or ranges; ties, skips, in-place activations, losses inside; bitwise equal."""
    graph, example = cases.build(name), cases.EXAMPLES[name]
    batches = [example.batch(rows, step) for step, rows in enumerate((13, 2))]
    for replicas, ranges in [
        ((1,), (((0, 1), (1, 3), (4, graph.num_layers)),)),
        ((1, 1), (True, True)),
        ((2, 1, 2), (True, False, True)),
    ]:
        plan = cases.make_plan(graph, replicas, 13, 4, schedule)
        plain, again = (
            trained(graph, p, batches, weight=example.weight)
            for p in (plan, recomputing(plan, *ranges))
        )
        assert_same(plain, again)


def test_backwards_may_be_split() -> None:
    """Zero-bubble with recomputation is zero-bubble without it, bitwise."""
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]
    plan = cases.make_plan(graph, (2, 1), 13, 4, "zero-bubble")
    batches = [example.batch(13, step) for step in range(2)]
    plain, again = (
        trained(graph, p, batches, weight=example.weight)
        for p in (plan, recomputing(plan, ((0, 1), (1, 3)), True))
    )
    assert_same(plain, again)


@pytest.mark.parametrize("ranges", [(True, True), (((0, 1),), ((2, 3),))], ids=str)
def test_random_numbers_are_drawn_again(
    ranges: tuple[Ranges, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second forward of a piece has the masks of the first; the user's generator is left alone."""
    compute_alone(monkeypatch)
    torch.manual_seed(0)
    graph = capture(Dropped().double(), torch.randn(3, 6).double(), loss=cases.squared_error)
    x = torch.randn(12, 6).double()
    plan = cases.make_plan(graph, (1, 1), 12, 3, split="early")
    state = torch.get_rng_state()
    plain = trained(graph, plan, [(x, x), (x, x)], seed=3)
    again = trained(graph, recomputing(plan, *ranges), [(x, x), (x, x)], seed=3)
    assert_same(plain, again)
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_is_entered_again() -> None:
    """In bf16 the second forward casts as the first did: bitwise the same, over two stages."""
    torch.manual_seed(0)
    graph = capture(cases.PlainMLP(), torch.randn(3, 6), loss=cases.squared_error)
    batch = torch.randn(12, 6), torch.randn(12, 4)
    plan = cases.make_plan(graph, (1, 1), 12, 3)
    plain, again, exact = (
        trained(graph, p, [batch, batch], precision=precision)
        for p, precision in [
            (plan, "bf16"),
            (recomputing(plan, True, ((3, 4), (4, 6))), "bf16"),
            (plan, "float32"),
        ]
    )
    assert_same(plain, again)
    assert plain[0][1] != exact[0][1]


class Counting(nn.Module):
    """Layers that read a buffer, then write into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Counted() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x)) * self.seen.clone()
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        return x


@pytest.mark.parametrize("model", [CASES["normed"].model, Counting], ids=["normed", "counting"])
def test_buffers_are_updated_once(model: Any) -> None:
    """Pitfall 13: running statistics, and a buffer that the forward also reads, as without it."""
    torch.manual_seed(0)
    graph = capture(model().double(), torch.randn(3, 6).double(), loss=cases.squared_error)
    x = torch.randn(12, 6).double()
    plan = cases.make_plan(graph, (1, 1), 12, 3)
    plain = trained(graph, plan, [(x, x), (x, x)])
    again = trained(graph, recomputing(plan, True, True), [(x, x), (x, x)])
    assert_same(plain, again)
    buffers = {n for n, _ in graph.stage(0, graph.num_layers).module.named_buffers()}
    assert buffers <= {name for state, _ in again for name in state}


def _wide(layers: int = 6) -> tuple[Workload, LayerGraph]:
    """Layers that save several times what goes from one to the next."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
        for _ in range(layers)
    ]  # fmt: skip
    workload = Workload(
        "wide",
        nn.Sequential(*blocks, nn.Linear(16, 16)),
        lambda rows: (torch.randn(rows, 16),),
        lambda rows: torch.randn(rows, 16),
        nn.functional.mse_loss,
    )
    graph = capture(workload.model, workload.inputs(4), loss=workload.loss, name="wide")
    return workload, graph


def test_measured_memory_is_what_the_plan_says() -> None:
    """Peaks of GPipe with 4 micro-batches, plain and recomputed by whole stages and by ranges."""
    workload, graph = _wide()
    profile = measure_profile(graph, workload, batch_sizes=(256,), rounds=1)
    batch = (workload.inputs(1024)[0], workload.targets(1024))
    plan = cases.make_plan(graph, (1,), 1024, 4, "gpipe")
    model = CostModel(profile, plan.cluster)
    measured: dict[Any, int] = {}
    for again in (False, True, ((0, 2), (2, 4), (4, 6)), ((3, 6),)):
        made = recomputing(plan, again)

        def work(trainer: Trainer) -> int:
            trainer.step(*batch)
            with trainer.measure_memory() as meter:
                trainer.step(*batch)
            return meter.peak_bytes

        (measured[again],) = on_ranks(graph, made, work, cases.OPTIMIZERS["adamw"])
        expected = stage_memory(model, made.stages, 0, 256, 4)
        assert expected is not None
        assert measured[again] == pytest.approx(expected.total, rel=0.03)
    assert measured[True] < measured[False] / 2
    assert measured[(0, 2), (2, 4), (4, 6)] < measured[True]


def test_the_timeline_shows_the_second_forward() -> None:
    """A recompute span inside of each backward, and no two spans overlap."""
    workload, graph = _wide(3)
    plan = recomputing(cases.make_plan(graph, (1,), 8, 2), ((0, 1), (1, 3)))
    batch = (workload.inputs(8)[0], workload.targets(8))

    def work(trainer: Trainer) -> list[Any]:
        trainer._recorder.enabled = True
        trainer.step(*batch)
        return list(trainer.timeline().spans)

    (spans,) = on_ranks(graph, plan, work)
    spans.sort(key=lambda span: span.start)
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    second = [s for s in spans if s.micro_batch == 1]
    kinds = [kind for kind, _ in itertools.groupby(s.kind for s in second)]
    assert kinds == ["receive", "forward", "receive", *["backward", "recompute"] * 2, "backward"]


def test_a_span_within_another_interrupts_it() -> None:
    """Also when it ends with an error."""
    recorder = Recorder(0, 0, 0, torch.device("cpu"), True)
    with recorder.span("backward", 3):
        try:
            with recorder.span("recompute"):
                raise RuntimeError
        except RuntimeError:
            pass
    spans = recorder.spans()
    assert [(s.kind, s.micro_batch) for s in spans] == [
        ("backward", 3), ("recompute", 3), ("backward", 3)
    ]  # fmt: skip
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))
