"""Gradients are summed in buckets while the last backward runs (docs/semantics.md, rule 7)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dapple.runtime import step
from dapple.runtime.gradients import GradientBuffers
from dapple.runtime.trainer import Trainer
from dapple.runtime.transport import Done
from tests.runtime import cases
from tests.runtime.test_gradients import gradients, sum_of_gradients
from tests.runtime.threads import ThreadTransport, on_ranks


@pytest.fixture
def small_buckets() -> Any:
    """A bucket for nearly every parameter."""
    with mock.patch.multiple("dapple.costs.model", BUCKET_BYTES=64, MOST_BUCKETS=1000):
        yield


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[Any, ...]]]:
    """Per rank: when its last backward begins and ends, and the sums it starts, in order."""
    noted: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    start = ThreadTransport.sum

    def summed(self: ThreadTransport, tensor: torch.Tensor, ranks: Any) -> Any:
        noted[self.rank].append((tuple(ranks), tensor.numel()))
        return start(self, tensor, ranks)

    backward = step.TrainingStep._backward

    def marked(self: step.TrainingStep, action: Any, batch: Any) -> None:
        rank = self._layout.topology.rank
        noted[rank].append(("begin", action.micro_batch))
        backward(self, action, batch)
        noted[rank].append(("end", action.micro_batch))

    monkeypatch.setattr(ThreadTransport, "sum", summed)
    monkeypatch.setattr(step.TrainingStep, "_backward", marked)
    return noted


@pytest.mark.parametrize("rows", [12, 5])
@pytest.mark.parametrize("name", ["gpt", "skip", "mlp"])
def test_small_buckets_change_no_gradient(small_buckets: Any, name: str, rows: int) -> None:
    """Five rows in four micro-batches on three replicas: some have none in the last one."""
    graph, example = cases.build(name), cases.EXAMPLES[name]

    def work(trainer: Trainer) -> dict[str, torch.Tensor]:
        trainer.step(*example.batch(3, 0), update=False)
        trainer.step(*example.batch(rows, 1))
        return gradients(trainer)

    plan = cases.make_plan(graph, (2, 3), rows, 4)
    found = on_ranks(graph, plan, work, weight=example.weight)
    assert cases.global_error(found, sum_of_gradients(name, [3, rows])) < cases.TOLERANCE


def test_sums_start_within_the_last_backward_and_only_there(small_buckets: Any, sums: Any) -> None:
    """All but the buckets' stragglers; nothing is summed in a backward before it."""
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]
    plan = cases.make_plan(graph, (2, 2), 12, 3)
    on_ranks(graph, plan, lambda t: t.step(*example.batch(12, 0)), weight=example.weight)
    for events in sums.values():
        place = {event: n for n, event in enumerate(events)}
        for micro_batch in range(3):
            within = events[place["begin", micro_batch] + 1 : place["end", micro_batch]]
            assert (len(within) > 5) == (micro_batch == 2)


def test_every_replica_starts_the_same_sums_in_the_same_order(
    small_buckets: Any, sums: Any
) -> None:
    """Also one without rows in the last micro-batch, which starts them all at its end."""
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]
    plan = cases.make_plan(graph, (1, 3), 5, 4)
    on_ranks(graph, plan, lambda t: t.step(*example.batch(5, 0)), weight=example.weight)
    started = [[e for e in sums[rank] if e[0] == (1, 2, 3)] for rank in (1, 2, 3)]
    assert len(started[0]) > 5
    assert started[0] == started[1] == started[2]


class Counting:
    """A transport on which every sum is over at once, and counted."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.sums: list[int] = []

    def sum(self, tensor: torch.Tensor, ranks: Any) -> Done:
        self.sums.append(tensor.numel())
        return Done()


def two_parameters() -> tuple[nn.Parameter, nn.Parameter, GradientBuffers]:
    """A first layer's of 20 numbers and a last layer's of 30, each in a bucket of its own."""
    first, last = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(30))
    buffers = GradientBuffers({"first": first, "last": last}, (0, 1), {})
    buffers.attach()
    return first, last, buffers


def test_a_bucket_waits_for_those_before_it(small_buckets: Any) -> None:
    """The first layer's gradient comes first here, but is summed after the last layer's."""
    first, last, buffers = two_parameters()
    transport = Counting()
    with buffers.summing(transport):  # type: ignore[arg-type]
        first.sum().backward()
        assert transport.sums == []
        last.sum().backward()
        assert transport.sums == [30, 20]
    assert transport.sums[:2] == [30, 20]


def test_a_missing_gradient_holds_back_its_bucket_until_the_end(small_buckets: Any) -> None:
    """Another replica may have it; the order of the sums must be the same on both."""
    first, _, buffers = two_parameters()
    transport = Counting()
    with buffers.summing(transport):  # type: ignore[arg-type]
        first.sum().backward()
    assert transport.sums[:2] == [30, 20]


def test_a_second_gradient_in_the_last_backward_is_refused(small_buckets: Any) -> None:
    """Its bucket may be on its way already: better no number than a wrong one."""
    parameter = nn.Parameter(torch.ones(20))
    buffers = GradientBuffers({"p": parameter}, (0, 1), {})
    buffers.attach()
    with buffers.summing(Counting()):  # type: ignore[arg-type]
        parameter.sum().backward()
        with pytest.raises(AssertionError, match="once"):
            parameter.sum().backward()


class _Nothing(torch.autograd.Function):
    """An operator that turns out to have no gradient for its parameter."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def test_a_gradient_that_a_backward_leaves_out_is_zeros_in_the_sum_and_none_in_the_update(
    small_buckets: Any,
) -> None:
    """Neither what the step before left in the buffer nor a gradient that one device has not."""
    first, last, buffers = two_parameters()
    transport = Counting()
    with buffers.summing(transport):  # type: ignore[arg-type]
        (first.sum() + last.sum()).backward()
    buffers.wait()
    buffers.zero()
    with buffers.summing(transport):  # type: ignore[arg-type]
        _Nothing.apply(first.sum(), last).backward()  # type: ignore[no-untyped-call]
        assert transport.sums[-2:] == [30, 20], "both are complete within the backward"
        assert buffers.buffers()[0][:30].tolist() == [0.0] * 30
    buffers.wait()
    assert last.grad is None
    assert first.grad is not None
    assert first.grad.tolist() == [1.0] * 20
