"""From summed gradients to new parameters, the same decision on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dapple.runtime.clipping import Clipping
from dapple.runtime.transport import Transport


@dataclass(frozen=True)
class Verdict:
    """What all ranks know of the gradients before the update.

    Attributes:
        gradient_norm: of the whole model; None if nobody wants it.
    """

    gradient_norm: float | None = None


class Update:
    """The update of one rank's parameters.

    Args:
        optimizer: this rank's; None if its stage has nothing to train.
        clipping: by the norm over the whole model; None: none.
        transport: the network.
        device: this rank's device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        clipping: Clipping | None,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._clipping = clipping
        self._transport = transport
        self._device = device

    def agree(self) -> Verdict:
        """Look at the summed gradients; all ranks call it, and come to the same verdict."""
        norm = None
        if self._clipping is not None:
            norm = self._clipping.total_norm(self._transport, self._device)
        return Verdict(norm)

    def apply(self, verdict: Verdict) -> None:
        """Update this rank's parameters."""
        if self._clipping is not None and verdict.gradient_norm is not None:
            self._clipping.clip(verdict.gradient_norm)
        if self._optimizer is not None:
            self._optimizer.step()
