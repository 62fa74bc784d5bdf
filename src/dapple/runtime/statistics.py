"""Batch norms of a stage: statistics over the whole micro-batch, whatever the replicas.

    replica 0   rows 0-2 -> mean, spread, count --+                 +-> normalise rows 0-2
    replica 1   rows 3-4 -> mean, spread, count --+--> AllReduce ---+-> normalise rows 3-4
    replica 2   no rows  -> zeros ----------------+                 +-> nothing

The backward sums what depends on all rows in the same way. Every replica takes part in every sum,
in the order of the graph, backward in the reverse order: none waits for one that skipped a sum. A
replica without rows adds zeros. For that every batch norm gets a backward, also where the loss of
a piece does not depend on it (docs/design-notes/0006-batch-norm.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dapple.errors import InputError
from dapple.graph import StageProgram
from dapple.graph.norms import BatchNormSpec, route_batch_norms, sum_dtype
from dapple.runtime.topology import Topology
from dapple.runtime.transport import STATISTICS, Transport

BatchNormRule = Literal["global", "local"]
"""Over the rows of the whole micro-batch, or of each replica apart."""


@dataclass
class _Piece:
    """Of a micro-batch in flight: (mean, 1 / deviation) per batch norm, and tokens to start from."""

    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)


class BatchStatistics(nn.Module):
    """Computes the batch norms of one stage on one rank.

    Args:
        program: the stage; its batch norms are computed here from now on.
        transport: the network.
        topology: this rank's place.
        rule: over which rows; with one replica there is no difference.
        device: this rank's device.

    Raises:
        InputError: there is no such rule.
    """

    def __init__(
        self,
        program: StageProgram,
        transport: Transport,
        topology: Topology,
        rule: BatchNormRule,
        device: torch.device,
    ) -> None:
        super().__init__()
        if rule not in get_args(BatchNormRule):
            known = ", ".join(f'"{name}"' for name in get_args(BatchNormRule))
            raise InputError(f'batch_norm "{rule}" is unknown; known: {known}')
        self._transport = transport
        self._ranks = topology.ranks[topology.stage]
        self._replica = topology.replica
        self._alone = rule == "local" or len(self._ranks) == 1
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._device = device
        self._pieces: dict[int, _Piece] = {}
        self._current = _Piece()
        self._keeps = False
        self._specs: tuple[BatchNormSpec, ...] = route_batch_norms(program.module, self)

    def begin(self, micro_batch: int | None) -> None:
        """The next forward is this micro-batch's; None: no backward follows."""
        self._current = _Piece()
        self._keeps = micro_batch is not None
        if micro_batch is not None:
            self._pieces[micro_batch] = self._current

    def forget(self) -> None:
        """No micro-batch is in flight."""
        self._pieces.clear()

    def resume(self, micro_batch: int) -> list[torch.Tensor]:
        """The next backward is this micro-batch's; it has to start from these tensors, too."""
        self._current = self._pieces.pop(micro_batch)
        return self._current.tokens

    def absent_forward(self) -> None:
        """Take part in a micro-batch's forward without rows."""
        if not self._alone:
            for spec in self._specs:
                self._gather(None, spec.channels, sum_dtype(spec.dtype))

    def absent_backward(self) -> None:
        """Take part in a micro-batch's backward without rows."""
        if not self._alone:
            for spec in reversed(self._specs):
                self.add(
                    torch.zeros(2, spec.channels, dtype=sum_dtype(spec.dtype), device=self._device)
                )

    def add(self, values: torch.Tensor) -> None:
        """Add up over the replicas, in place."""
        self._transport.sum(values, self._ranks, STATISTICS).wait()

    def forward(
        self,
        position: int,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_variance: torch.Tensor | None,
        momentum: float,
        epsilon: float,
    ) -> torch.Tensor:
        """One batch norm in training mode; see `route_batch_norms`.

        Raises:
            InputError: there is one value per channel only.
        """
        if self._alone:
            _check_count(x.numel() // x.shape[1])
            kept = (running_mean, running_variance)
            cudnn = bool(torch.backends.cudnn.enabled)
            return torch.batch_norm(x, weight, bias, *kept, True, momentum, epsilon, cudnn)
        found = self._current.found
        fresh = position == len(found)
        if fresh:
            mean, variance, count = self._gather(x, x.shape[1], sum_dtype(x.dtype))
            found.append((mean, torch.rsqrt(variance + epsilon), count))
            with torch.no_grad():
                _update(running_mean, mean, momentum)
                _update(running_variance, variance * (count / (count - 1)), momentum)
        # Else it is computed again, for a backward: its statistics are known.
        assert position < len(found), "batch norms ran out of order"
        return self._normalise(x, weight, bias, found[position], fresh)

    def _normalise(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        known: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        fresh: bool,
    ) -> torch.Tensor:
        given = [x, weight, bias]
        reached = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
        if not reached:
            given = [None if t is None else t.detach() for t in given]
        result: torch.Tensor
        with torch.set_grad_enabled(self._keeps):
            result, token = _Normalise.apply(  # type: ignore[no-untyped-call]
                self._anchor, *given, *known, self.add
            )
        if self._keeps and fresh:
            # A token of what is computed again would keep its activations for nothing.
            self._current.tokens.append(token)
        return result if reached else result.detach()

    def _gather(
        self, x: torch.Tensor | None, channels: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and variance per channel, and the number of values, over all replicas."""
        parts = torch.zeros(len(self._ranks), 2 * channels + 1, dtype=dtype, device=self._device)
        if x is not None:
            variance, mean = torch.var_mean(x.detach().to(dtype), _others(x), correction=0)
            count = x.numel() // channels
            parts[self._replica, :channels] = mean
            parts[self._replica, channels:-1] = variance
            parts[self._replica, -1] = count
        self.add(parts)
        means, variances, counts = parts.split([channels, channels, 1], dim=1)
        total = counts.sum()
        if x is not None and count == 1:
            _check_count(int(total))
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean).square()) * counts).sum(0) / total
        return mean, variance, total


class _Normalise(Function):
    """(x - mean) / deviation * weight + bias, with statistics of all replicas' rows.

    Also returns a token, a scalar whose gradient leads here whatever the loss depends on.
    """

    @staticmethod
    def forward(
        context: Any,
        anchor: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        count: torch.Tensor,
        add: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise this replica's rows."""
        context.save_for_backward(x, weight, mean, inverse, count)
        context.add = add
        context.has_bias = bias is not None
        context.set_materialize_grads(False)
        scale = inverse if weight is None else inverse * weight
        result = (x - _beside(mean, x)) * _beside(scale, x)
        if bias is not None:
            result = result + _beside(bias, x)
        return result.to(x.dtype), torch.zeros_like(anchor)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
        """The gradients of x, weight and bias; those of x depend on all replicas' rows."""
        x, weight, mean, inverse, count = context.saved_tensors
        nothing = gradient is None
        wide = torch.zeros_like(x) if gradient is None else gradient
        wide = wide.to(mean.dtype)
        centred = (x - _beside(mean, x)) * _beside(inverse, x)
        own = torch.stack([wide.sum(_others(x)), (wide * centred).sum(_others(x))])
        total = own.clone()
        context.add(total)
        if nothing and not total.any():
            return (None,) * 8
        shared = (_beside(total[0], x) + centred * _beside(total[1], x)) / count
        scale = inverse if weight is None else inverse * weight
        of_x = ((wide - shared) * _beside(scale, x)).to(x.dtype)
        of_weight = None if nothing or weight is None else own[1].to(weight.dtype)
        of_bias = own[0] if context.has_bias and not nothing else None
        return None, of_x, of_weight, of_bias, None, None, None, None


def _others(x: torch.Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [d for d in range(x.dim()) if d != 1]


def _beside(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One value per channel, shaped to go with x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _update(running: torch.Tensor | None, value: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _check_count(count: int) -> None:
    if count == 1:
        raise InputError(
            "a batch norm was given one value per channel, which has no variance; plan fewer "
            "micro-batches, or drop the last rows of the data"
        )
