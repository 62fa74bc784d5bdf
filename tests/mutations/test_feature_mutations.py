"""Faults put into messages, sums, batch norms, recomputation and split backwards: each must show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dapple.graph import capture
from dapple.graph.recompute import Recomputed
from dapple.runtime import statistics
from dapple.runtime.gradients import GradientBuffers
from dapple.runtime.stage import StageRunner
from dapple.runtime.step import TrainingStep
from dapple.runtime.transport import Done, Pending
from tests.graph.models import Dropped
from tests.runtime import cases, threads
from tests.runtime.features import Features, error
from tests.runtime.test_recompute import recomputing, trained
from tests.runtime.threads import ThreadTransport, compute_alone

Patch = pytest.MonkeyPatch
MLP = Features(
    model="mlp",
    schedule=("early-backward", "A", 1),
    replicas=(3, 2),
    num_micro_batches=3,
    recompute="nothing",
    shares="even",
    shard="none",
    norm=None,
    calls="an update each",
    rows="whole batches",
)
SPLIT = dataclasses.replace(MLP, schedule=("zero-bubble", "A", 1), replicas=(1, 1, 1))
VIRTUAL = dataclasses.replace(MLP, model="skip", schedule=("interleaved", "A", 2))
NORMED = dataclasses.replace(MLP, model="resnet")
NORMED_AGAIN = dataclasses.replace(NORMED, replicas=(1, 1), recompute="stages")


def sum_twice(patch: Patch) -> None:
    """Every AllReduce of a stage's own gradients is done twice."""
    original = GradientBuffers.start_sums

    def start(self: GradientBuffers, transport: Any) -> list[Pending]:
        for pending in original(self, transport):
            pending.wait()
        group = self._groups[0]
        transport.sum(group.buffer, group.ranks).wait()
        return []

    patch.setattr(GradientBuffers, "start_sums", start)


def start_buckets_too_early(patch: Patch) -> None:
    """A bucket is summed when the first of its gradients is complete."""
    original = GradientBuffers._cut

    def cut(self: GradientBuffers, *arguments: Any) -> None:
        original(self, *arguments)
        for bucket in self._buckets:
            bucket.size = 1

    patch.setattr(GradientBuffers, "_cut", cut)


def start_sums_one_micro_batch_early(patch: Patch) -> None:
    """Gradients are summed around the last backward but one."""

    def summing(self: TrainingStep, action: Any) -> AbstractContextManager[object]:
        early = max(0, self._layout.num_micro_batches - 2)
        if not action.frees or action.micro_batch != early:
            return nullcontext()
        self._stages_left -= 1
        return self._sums(action.stage, self._stages_left == 0)

    patch.setattr(TrainingStep, "_summing", summing)


def leave_out_weight_gradients(patch: Patch) -> None:
    """The W half of one micro-batch's backward does not run."""
    original = StageRunner.backward_weights

    def all_but_one(self: StageRunner, micro_batch: int) -> None:
        if micro_batch != 1:
            original(self, micro_batch)

    patch.setattr(StageRunner, "backward_weights", all_but_one)


def update_running_statistics_twice(patch: Patch) -> None:
    """A micro-batch moves them by two steps."""
    original = statistics._update

    def twice(*arguments: Any) -> None:
        original(*arguments)
        original(*arguments)

    patch.setattr(statistics, "_update", twice)


def count_recomputed_batches(patch: Patch) -> None:
    """The second forward of a recomputed range writes into the buffers as the first did."""

    def forward(self: Recomputed, *values: Any) -> Any:
        def run(*given: Any) -> Any:
            return self.body(*(values[i] if i in self._written else v for i, v in enumerate(given)))

        kept = [None if i in self._written else value for i, value in enumerate(values)]
        return checkpoint(run, *kept, use_reentrant=False, preserve_rng_state=False)

    patch.setattr(Recomputed, "forward", forward)


def lose_the_bytes_of_a_message(patch: Patch) -> None:
    """A message is taken for received before it is: its buffer is what it was."""
    original = ThreadTransport.receive

    def lossy(self: ThreadTransport, buffer: Any, peer: int, stages: Any) -> Pending:
        calls = self._calls["receives"]
        self._calls["receives"] += 1
        if calls != 1:
            return original(self, buffer, peer, stages)
        original(self, torch.empty_like(buffer), peer, stages)
        buffer.zero_()
        return Done()

    patch.setattr(ThreadTransport, "receive", lossy)


MUTATIONS: list[tuple[Callable[[Patch], None], Features]] = [
    (sum_twice, MLP),
    (start_buckets_too_early, MLP),
    (start_sums_one_micro_batch_early, MLP),
    (leave_out_weight_gradients, SPLIT),
    (update_running_statistics_twice, NORMED),
    (count_recomputed_batches, NORMED_AGAIN),
    (lose_the_bytes_of_a_message, MLP),
    (lose_the_bytes_of_a_message, VIRTUAL),
]


@pytest.mark.parametrize(
    ("mutate", "run"), MUTATIONS, ids=[f"{m.__name__}-{run.model}" for m, run in MUTATIONS]
)
def test_parity_sees_the_fault(
    mutate: Callable[[Patch], None], run: Features, monkeypatch: Patch
) -> None:
    """With the fault the error is far above the tolerance that holds without it."""
    assert error(run) < cases.TOLERANCE
    mutate(monkeypatch)
    assert error(run) > 1e4 * cases.TOLERANCE


@pytest.mark.parametrize("number", [0, 2])
def test_a_send_that_is_left_out_is_no_end(number: int, monkeypatch: Patch) -> None:
    """Its receiver takes the next message for it, and in the end waits for one that never comes."""
    original = ThreadTransport.send

    def forgetful(self: ThreadTransport, tensor: Any, peer: int, stages: Any) -> Pending:
        calls = self._calls["sends"]
        self._calls["sends"] += 1
        return Done() if calls == number else original(self, tensor, peer, stages)

    monkeypatch.setattr(threads, "TIME_LIMIT", 1.0)
    monkeypatch.setattr(ThreadTransport, "send", forgetful)
    with pytest.raises((TimeoutError, AssertionError)):
        error(MLP)


def test_masks_that_are_drawn_anew_in_the_second_forward_show(monkeypatch: Patch) -> None:
    """Recomputation is held bitwise against training without it."""
    compute_alone(monkeypatch)
    torch.manual_seed(0)
    graph = capture(Dropped().double(), torch.randn(3, 6).double(), loss=cases.squared_error)
    x = torch.randn(12, 6).double()
    plan = cases.make_plan(graph, (1, 1), 12, 3)
    again = recomputing(plan, True, True)

    def difference() -> float:
        one, other = (trained(graph, p, [(x, x)])[0][0] for p in (plan, again))
        return max((one[name] - other[name]).abs().max().item() for name in one)

    assert difference() == 0.0
    again_now: list[bool] = []
    enter, forward = StageRunner._again, StageRunner.forward

    @contextmanager
    def entered(self: StageRunner) -> Iterator[None]:
        again_now.append(True)
        with enter(self):
            yield
        again_now.pop()

    def unseeded(self: StageRunner, *arguments: Any) -> Any:
        *others, seed = arguments
        return forward(self, *others, lambda layer: None if again_now else seed(layer))

    monkeypatch.setattr(StageRunner, "_again", entered)
    monkeypatch.setattr(StageRunner, "forward", unseeded)
    assert difference() > 1e-6
