"""Faults put into the runtime on purpose: the parity check must see each of them.

A check that lets one of these pass would let the fault pass as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dapple.runtime import exchange, incoming, objectives, sums
from dapple.runtime.batch import Objective
from dapple.runtime.gradients import GradientBuffers
from dapple.runtime.layout import Layout
from dapple.runtime.stage import StageRunner
from tests.runtime import cases
from tests.runtime.cases import Run
from tests.runtime.test_parity_threads import error

Patch = pytest.MonkeyPatch
# Unequal replicas, tied weights, unequal and masked pieces, plain gradient descent.
GPT = Run("gpt", (3, 2), 5, 13, optimizer="sgd")
# A skip over the middle stage, and pieces of unequal size.
SKIP = Run("skip", (2, 1, 3), 4, 13, optimizer="sgd", split="early")

# Tensors past all cuts that the loss leaves out.
BESIDE = Run("beside", (2, 1), 5, 13)


def drop_the_weight(patch: Patch) -> None:
    """Every piece counts the same: a mean of means."""
    original = objectives.piece_weights

    def equal(*arguments: Any) -> dict[int, float]:
        return {m: float(w > 0) for m, w in original(*arguments).items()}

    patch.setattr(objectives, "piece_weights", equal)


def do_not_scale_the_loss(patch: Patch) -> None:
    """Each piece's loss starts its backward as it is."""
    original = Objective.loss

    def unscaled(self: Objective, micro_batch: int, rows: slice, results: Any) -> Any:
        loss = original(self, micro_batch, rows, results)
        weight = self._weights[micro_batch]
        return None if loss is None else loss / (weight / self._total).to(loss.dtype)

    patch.setattr(Objective, "loss", unscaled)


def swap_the_order_of_pieces(patch: Patch) -> None:
    """Rows from several replicas are put together in the wrong order."""

    class Swapped:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
            return torch.cat(tensors[::-1], dim)

    patch.setattr(incoming, "torch", Swapped())


def average_one_sum(number: int) -> Callable[[Patch], None]:
    """One AllReduce of gradients gives the mean over its ranks."""

    def mutate(patch: Patch) -> None:
        original = GradientBuffers.start_sums

        def start(self: GradientBuffers, transport: Any) -> list[Any]:
            group = self._groups[number]
            for pending in original(self, transport):
                pending.wait()
            group.buffer /= len(group.ranks)
            return []

        patch.setattr(GradientBuffers, "start_sums", start)

    return mutate


def leave_out_the_tied_sum(patch: Patch) -> None:
    """Each holder of a tied weight sums over its own stage only."""
    original = sums.GradientBuffers

    def without_ties(parameters: Any, stage_ranks: Any, tied_ranks: Any) -> GradientBuffers:
        return original(parameters, stage_ranks, dict.fromkeys(tied_ranks, stage_ranks))

    patch.setattr(sums, "GradientBuffers", without_ties)


def keep_the_last_micro_batch_only(patch: Patch) -> None:
    """Gradients of earlier micro-batches are forgotten."""
    original = StageRunner.backward

    def forgetful(self: StageRunner, *arguments: Any, **named: Any) -> Any:
        for parameter in self.program.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        return original(self, *arguments, **named)

    patch.setattr(StageRunner, "backward", forgetful)


def keep_old_gradients(patch: Patch) -> None:
    """Gradients of the step before are added to those of the next."""
    patch.setattr(GradientBuffers, "zero", lambda self: None)


def add_up_one_consumer_only(patch: Patch) -> None:
    """Of several stages that read a tensor, only the first sends a gradient that counts."""

    def first(row: list[Any]) -> Any:
        values = [incoming.take() for incoming in row if not incoming.is_empty]
        return values[0] if values else None

    patch.setattr(exchange, "added", first)


def take_zeros_for_a_gradient(patch: Patch) -> None:
    """Nobody hears that a tensor has no gradient; the zeros in its place are taken for one."""
    patch.setattr(incoming.Incoming, "is_none", lambda self: False)


def give_targets_of_other_rows(patch: Patch) -> None:
    """The last stage's targets are shifted by one row against its inputs."""
    original = Objective.loss

    def shifted(self: Objective, micro_batch: int, rows: slice, results: Any) -> Any:
        shift = 1 if rows.start == 0 else -1
        return original(self, micro_batch, slice(rows.start + shift, rows.stop + shift), results)

    patch.setattr(Objective, "loss", shifted)


def take_inputs_of_other_rows(patch: Patch) -> None:
    """A replica of a later stage takes the mask of the rows of the first replica."""
    original = Layout.slice

    def first_rows(self: Layout, micro_batch: int) -> slice:
        where = original(self, micro_batch)
        if self.topology.stage != 1:
            return where
        return slice(0, where.stop - where.start)

    patch.setattr(Layout, "slice", first_rows)


MUTATIONS: list[tuple[Callable[[Patch], None], Run]] = [
    (drop_the_weight, GPT),
    (drop_the_weight, SKIP),
    (do_not_scale_the_loss, GPT),
    (swap_the_order_of_pieces, GPT),
    (swap_the_order_of_pieces, SKIP),
    (average_one_sum(0), GPT),
    (average_one_sum(-1), GPT),
    (leave_out_the_tied_sum, GPT),
    (keep_the_last_micro_batch_only, SKIP),
    (keep_old_gradients, SKIP),
    (add_up_one_consumer_only, SKIP),
    (take_zeros_for_a_gradient, BESIDE),
    (give_targets_of_other_rows, GPT),
    (take_inputs_of_other_rows, SKIP),
]


@pytest.mark.parametrize(
    ("mutate", "run"),
    MUTATIONS,
    ids=[f"{m.__qualname__.split('.')[0]}-{run.model}" for m, run in MUTATIONS],
)
def test_parity_sees_the_fault(
    mutate: Callable[[Patch], None], run: Run, monkeypatch: Patch
) -> None:
    """With the fault the error is far above the tolerance that holds without it."""
    assert error(run) < cases.TOLERANCE
    mutate(monkeypatch)
    assert error(run) > 1e4 * cases.TOLERANCE
