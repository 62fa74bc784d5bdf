"""The global batch of a step, its pieces, and the loss over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dapple.errors import InputError
from dapple.runtime.layout import Layout
from dapple.runtime.metrics import MetricSums
from dapple.runtime.prediction import Outputs
from dapple.runtime.window import Window

WeightFunction = Callable[[Any, Any], float]
Probe = Callable[[slice, Sequence[Any], Any, torch.Tensor], None]
LossOfResults = Callable[[tuple[Any, ...], Any], torch.Tensor]


@dataclass
class Batch:
    """The global batch of a step.

    Attributes:
        inputs: the model's inputs by name, on this rank's device.
        batched: names of those that have rows.
        window: where the rows of the global batch lie in them.
        objective: computes the loss of this rank's pieces; None where no loss is computed.
        outputs: collects the model's outputs of this rank's pieces; None where nobody wants them.
    """

    inputs: dict[str, Any]
    batched: frozenset[str]
    window: Window = field(default_factory=Window)
    objective: Objective | None = None
    outputs: Outputs | None = None

    def rows(self, rows: slice) -> dict[str, Any]:
        """The inputs of one piece."""
        here = self.window.local(rows)
        return {n: v[here] if n in self.batched else v for n, v in self.inputs.items()}


class Objective:
    """The loss of this rank's pieces: sum_i w_i loss_i / sum_i w_i (docs/semantics.md, Loss).

    Args:
        loss_of: the loss of a piece from the model's flat outputs and the piece's targets.
        targets_of: the targets of a row range.
        weights: w_i of this rank's pieces by micro-batch.
        total: all weights of the global batch added up, available after `ready`.
        ready: waits until `total` is complete.
        probe: is shown one piece's (rows, results, targets, loss), to check the loss function.
        scale: what the loss is multiplied by before the backward, against underflow in fp16.
        metrics: takes further numbers of each piece; None: there are none.

    Attributes:
        has_gradient: the loss of some piece so far needs a backward.
    """

    def __init__(
        self,
        loss_of: LossOfResults,
        targets_of: Callable[[slice], Any],
        weights: dict[int, float],
        total: torch.Tensor,
        ready: Callable[[], object],
        probe: Probe | None = None,
        scale: float = 1.0,
        metrics: MetricSums | None = None,
    ) -> None:
        self._loss_of = loss_of
        self._targets_of = targets_of
        self._weights = weights
        self._total = total
        self._ready = ready
        self._probe = probe
        self._scale = scale
        self._share = torch.zeros_like(total)
        self.has_gradient = False
        self.metrics = metrics

    def loss(self, micro_batch: int, rows: slice, results: tuple[Any, ...]) -> torch.Tensor | None:
        """The scaled loss of a piece, to start its backward from; None if it has no weight."""
        weight = self._weights[micro_batch]
        if weight == 0:
            # 0 x NaN is NaN: a piece without weight must not touch loss and gradients at all.
            return None
        self._ready()
        targets = self._targets_of(rows)
        before = _versions(results) if self._probe is not None else []
        loss = self._loss_of(results, targets)
        if self._probe is not None:
            # A loss that writes into the outputs can't be tried on them once more.
            if _versions(results) == before:
                self._probe(rows, results, targets, loss.detach())
            self._probe = None
        constant = loss.grad_fn is None  # also one that asks for gradients itself
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # shares of it would be rounded to three digits
        weighted = loss * (weight / self._total).to(loss.dtype)
        self._share += weighted.detach()
        if constant:
            weighted = weighted.detach()
        self.has_gradient |= weighted.requires_grad
        if self.metrics is not None:
            self.metrics.add(results, targets, weight / float(self._total))
        return weighted * self._scale if self._scale != 1 else weighted

    @property
    def has_weight(self) -> bool:
        """Some piece of this rank has weight."""
        return any(self._weights.values())

    def share(self) -> torch.Tensor:
        """What this rank's pieces add to the loss of the global batch, a scalar, after them all."""
        # A rank whose pieces have no weight has not waited yet, and gloo wants every handle waited
        # for.
        self._ready()
        return self._share


def _versions(results: Sequence[Any]) -> list[int]:
    """How often each tensor has been written into."""
    return [value._version for value in results if isinstance(value, torch.Tensor)]


def loss_mixes_rows(
    loss_of: LossOfResults,
    weight_of: Callable[[slice], float],
    rows: slice,
    results: Sequence[Any],
    targets: Any,
    loss: torch.Tensor,
) -> bool:
    """Whether a piece's loss differs from the weighted mean over its two halves.

    Then it is no mean over rows (a contrastive loss over the batch), and pieces give other
    gradients than the whole batch. False where outputs don't come in rows.

    Args:
        loss_of: the loss of flat results and targets.
        weight_of: w of a row range of the global batch.
        rows: the piece's rows in the global batch.
        results: the model's flat outputs for the piece.
        targets: the piece's targets.
        loss: the piece's loss.
    """
    count = rows.stop - rows.start
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    if count < 2 or any(t.dim() == 0 or t.shape[0] != count for t in tensors):
        return False
    weighted, total = 0.0, 0.0
    with torch.no_grad():
        for half in (slice(0, count // 2), slice(count // 2, count)):
            weight = weight_of(slice(rows.start + half.start, rows.start + half.stop))
            if weight:
                part = [r[half] if isinstance(r, torch.Tensor) else r for r in results]
                weighted += weight * float(loss_of(tuple(part), rows_of(targets, half)))
                total += weight
    whole = float(loss)
    if not total or not math.isfinite(whole) or not math.isfinite(weighted):
        return False
    tolerance = max(1e-3, 8 * torch.finfo(loss.dtype).eps)
    return abs(weighted / total - whole) > tolerance * abs(whole) + 1e-6


def piece_weights(
    layout: Layout,
    weight: WeightFunction | None,
    inputs_of: Callable[[slice], Any],
    targets_of: Callable[[slice], Any],
) -> dict[int, float]:
    """w_i of this rank's pieces by micro-batch: by `weight`, or their rows.

    Args:
        layout: the rows of the step.
        weight: (inputs, targets) of a piece -> w_i; None: rows.
        inputs_of: the inputs of a row range.
        targets_of: the targets of a row range.

    Raises:
        InputError: a weight is negative or not finite.
    """
    weights: dict[int, float] = {}
    for micro_batch in range(layout.num_micro_batches):
        where = layout.slice(micro_batch)
        count = where.stop - where.start
        if weight is None or count == 0:
            weights[micro_batch] = float(count)
        else:
            weights[micro_batch] = float(weight(inputs_of(where), targets_of(where)))
    _check_weights(weights)
    return weights


def check_targets(targets: Any, rows: int) -> None:
    """Every target tensor has one entry per row of the batch.

    Raises:
        InputError: some tensor has not.
    """
    for leaf in pytree.tree_leaves(targets):
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] != rows):
            raise InputError(
                f"targets have shape {list(leaf.shape)}, but the batch has {rows} rows; pass one "
                "target per row"
            )


def _check_weights(weights: dict[int, float]) -> None:
    for micro_batch, weight in weights.items():
        if not 0 <= weight < float("inf"):
            raise InputError(
                f"the weight of micro-batch {micro_batch} is {weight}; weights must be finite and "
                "not negative"
            )


def rows_of(targets: Any, where: slice) -> Any:
    """A row range of every target tensor; everything else as it is."""
    if isinstance(targets, torch.Tensor):
        return targets[where]
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[where], targets)
