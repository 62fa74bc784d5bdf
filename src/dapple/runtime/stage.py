"""The computation of one stage on one rank: forward, backward, loss; no communication."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dapple.errors import RunError
from dapple.graph import SeedLayer, StageProgram, leave_generators
from dapple.runtime.deferral import defer_weight_gradients
from dapple.runtime.process import random_state_kept
from dapple.runtime.recorder import Recorder
from dapple.runtime.statistics import BatchStatistics


@dataclass
class _InFlight:
    """What one micro-batch leaves behind between its forward and its backward.

    Of the outputs only the gradient edges are kept: the tensors themselves can go as soon as they
    are sent, unless autograd saved them.
    """

    leaves: tuple[torch.Tensor | None, ...]
    edges: tuple[GradientEdge | None, ...]
    loss: torch.Tensor | None = None


class StageRunner:
    """Runs a stage's micro-batches and holds those in flight.

    Args:
        program: the stage's layers.
        statistics: computes its batch norms.
        device: this rank's device.
        recorder: where the spans of forwards that run again are noted.
        splits_backward: `backward` may be asked to leave weights to `backward_weights`.
        certain: names of tensors that it reads whose gradient never lacks.
    """

    def __init__(
        self,
        program: StageProgram,
        statistics: BatchStatistics | None = None,
        device: torch.device | None = None,
        recorder: Recorder | None = None,
        splits_backward: bool = False,
        certain: Collection[str] = (),
    ) -> None:
        self.program = program
        self._certain = certain
        self._statistics = statistics
        self._deferred = defer_weight_gradients(program.module) if splits_backward else None
        self._device = device or torch.device("cpu")
        self._recorder = recorder
        for part in program.recomputed:
            part.again = self._again
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def in_flight(self) -> int:
        """Micro-batches with forward done and backward not."""
        return len(self._in_flight)

    def forget(self) -> None:
        """Let go of micro-batches in flight: those of a step that raised have no backward."""
        self._in_flight.clear()
        if self._statistics is not None:
            self._statistics.forget()
        if self._deferred is not None:
            self._deferred.forget()

    def forward(
        self,
        micro_batch: int,
        rows: int,
        inputs: Mapping[str, Any],
        received: Mapping[str, torch.Tensor],
        seed: SeedLayer = leave_generators,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
        """Compute a micro-batch's piece.

        Args:
            micro_batch: its number.
            rows: rows of this replica.
            inputs: the model's inputs, this replica's rows.
            received: boundary tensors from earlier stages by name, this replica's rows. Each
                is used for this micro-batch only, so hooks can't pile up on it.
            seed: seeds the generators for a layer that draws random numbers, here and where its
                forward runs again.

        Returns:
            Boundary tensors in the order of `program.makes` (detached), and the model's flat
            outputs if this is the last stage.
        """
        leaves = []
        for tensor in self.program.reads:
            value = received[tensor.name]
            if tensor.needs_grad:
                value.requires_grad_(True)
            leaves.append(value if tensor.needs_grad else None)
        if self._statistics is not None:
            self._statistics.begin(micro_batch)
        with self._random_state_kept():
            made, results = self.program(rows, inputs, received, seed)
        if results:
            results = self._free(results, leaves)
        edges = tuple(get_gradient_edge(t) if t.requires_grad else None for t in made)
        self._in_flight[micro_batch] = _InFlight(tuple(leaves), edges)
        return tuple(t.detach() for t in made), results

    @staticmethod
    def _free(results: tuple[Any, ...], leaves: list[torch.Tensor | None]) -> tuple[Any, ...]:
        """The model's outputs, with copies of what came from earlier stages as it is.

        A loss may write into an output, which autograd forbids for the tensors that it starts from.
        """
        given = {id(leaf) for leaf in leaves if leaf is not None}
        return tuple(value.clone() if id(value) in given else value for value in results)

    def evaluate(
        self, rows: int, inputs: Mapping[str, Any], received: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
        """Compute a piece without gradients and without leaving anything behind."""
        if self._statistics is not None:
            self._statistics.begin(None)
        with torch.no_grad():
            return self.program(rows, inputs, received)

    def absent_forward(self) -> None:
        """Take part in the forward of a micro-batch of which this replica has no rows."""
        if self._statistics is not None:
            self._statistics.absent_forward()

    def absent_backward(self) -> None:
        """Take part in the backward of a micro-batch of which this replica has no rows."""
        if self._statistics is not None:
            self._statistics.absent_backward()

    def set_loss(self, micro_batch: int, scaled_loss: torch.Tensor | None) -> None:
        """Give the loss that the backward of a micro-batch on the last stage starts from.

        None: the piece has no weight, and its backward gives no gradients.
        """
        self._in_flight[micro_batch].loss = scaled_loss

    def backward(
        self,
        micro_batch: int,
        gradients: Sequence[torch.Tensor | None],
        weights: bool = True,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute a micro-batch's gradients; parameters accumulate theirs in `.grad`.

        Args:
            micro_batch: its number.
            gradients: per tensor of `program.makes` its summed gradient; None: it has none.
            weights: False: gradients of weights that can wait do so until `backward_weights`.

        Returns:
            Per tensor of `program.reads` its gradient; None where it needs none, or where the
            loss does not depend on it.

        Raises:
            RunError: one that is certain to have a gradient has none.
        """
        state = self._in_flight.pop(micro_batch)
        roots: list[Any] = []
        starts: list[torch.Tensor | None] = []
        for edge, gradient in zip(state.edges, gradients, strict=True):
            if edge is not None and gradient is not None:
                roots.append(edge)
                starts.append(gradient)
        if state.loss is not None and state.loss.requires_grad:
            roots.append(state.loss)
            starts.append(None)
        has_loss = bool(roots)
        if self._statistics is not None:
            tokens = self._statistics.resume(micro_batch)
            roots += tokens
            starts += [torch.zeros_like(token) for token in tokens]
        if roots:
            torch.autograd.backward(roots, starts)
        results = tuple(None if leaf is None else leaf.grad for leaf in state.leaves)
        if has_loss:
            self._check(results)
        if self._deferred is not None:
            self._deferred.close(micro_batch)
            if weights:
                self._deferred.run(micro_batch)
        return results

    def backward_weights(self, micro_batch: int) -> None:
        """Compute the gradients of weights that a micro-batch's backward has left."""
        if self._deferred is not None:
            self._deferred.run(micro_batch)

    def _check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for tensor, gradient in zip(self.program.reads, gradients, strict=True):
            if gradient is None and tensor.needs_grad and tensor.name in self._certain:
                raise RunError(
                    f'the tensor "{tensor.name}" between stages got no gradient from the loss, though '
                    "the captured model says that every loss gives it one; cut the model elsewhere, "
                    "and please report this"
                )

    def _random_state_kept(self) -> AbstractContextManager[None]:
        return random_state_kept(self._device) if self.program.is_random else nullcontext()

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Around the second forward of a recomputed range, within a backward."""
        recorder = self._recorder
        span = nullcontext() if recorder is None else recorder.span("recompute")
        with span, self._random_state_kept():
            yield
