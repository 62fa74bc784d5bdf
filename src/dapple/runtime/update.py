"""From summed gradients to new parameters, the same decision on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dapple.runtime.clipping import Clipping
from dapple.runtime.scaling import adapt, overflowed, unscale
from dapple.runtime.sharding import OptimizerShard
from dapple.runtime.transport import Transport


@dataclass(frozen=True)
class Verdict:
    """What all ranks know of the gradients before the update.

    Attributes:
        gradient_norm: of the whole model; None if nobody wants it.
        overflow: some rank's gradients are not finite, and no rank updates.
    """

    gradient_norm: float | None = None
    overflow: bool = False


class Update:
    """The update of one rank's parameters.

    Args:
        parameters: this rank's trainable ones.
        optimizer: theirs; None if there are none.
        shard: what of a sharded optimizer this rank updates; None: it is not sharded.
        scheduler: of the optimizer's learning rate, stepped after each update.
        clipping: by the norm over the whole model; None: none.
        scaler: the scale that the loss had; None: none.
        transport: the network.
        device: this rank's device.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        shard: OptimizerShard | None,
        scheduler: LRScheduler | None,
        clipping: Clipping | None,
        scaler: torch.amp.GradScaler | None,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._shard = shard
        self._scheduler = scheduler
        self._clipping = clipping
        self._scaler = scaler
        self._transport = transport
        self._device = device

    def agree(self) -> Verdict:
        """Look at the summed gradients; all ranks call it, and come to the same verdict.

        Sets the loss scale of the next step too.

        Raises:
            RunError: their norm is not finite, and that was to be an error.
        """
        if self._clipping is None and self._scaler is None:
            return Verdict()
        # A slot for each rank's norm, and the number of ranks with an overflow.
        size = self._transport.world_size
        slots = torch.zeros(size + 1, dtype=torch.float64)
        if self._scaler is not None:
            gradients = self._gradients()
            slots[size] = float(overflowed(gradients))
            unscale(self._scaler, gradients)
        if self._clipping is not None:
            slots[self._transport.rank] = self._clipping.local_norm()
        slots = slots.to(self._device)
        self._transport.sum(slots, tuple(range(size))).wait()
        overflow = bool(slots[size])
        if self._scaler is not None:
            adapt(self._scaler, overflow)
        norm = None
        if self._clipping is not None:
            norm = self._clipping.total_norm(slots[:size])
            if not overflow:
                self._clipping.check(norm)
        return Verdict(norm, overflow)

    def apply(self, verdict: Verdict) -> None:
        """Update this rank's parameters, unless some rank's gradients overflowed."""
        if verdict.overflow:
            return
        if self._clipping is not None and verdict.gradient_norm is not None:
            self._clipping.clip(verdict.gradient_norm)
        if self._optimizer is not None:
            self._optimizer.step()
        if self._shard is not None:
            self._shard.spread()
        if self._scheduler is not None:
            self._scheduler.step()

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]
