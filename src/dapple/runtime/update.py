"""From summed gradients to new parameters, the same decision on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dapple.graph.precision import PrecisionName
from dapple.runtime.clipping import Clipping, counted_here
from dapple.runtime.optimizers import (
    OptimizerFactory,
    Parameters,
    SchedulerFactory,
    make_optimizer,
    make_scheduler,
)
from dapple.runtime.scaling import adapt, overflowed, unscale
from dapple.runtime.sharding import OptimizerShard
from dapple.runtime.topology import Topology
from dapple.runtime.transport import Transport


@dataclass(frozen=True)
class Verdict:
    """What all ranks know of the gradients before the update.

    Attributes:
        gradient_norm: of the whole model; None if nobody wants it.
        overflow: some rank's gradients are not finite.
        empty: no row had weight, so there are no gradients.
    """

    gradient_norm: float | None = None
    overflow: bool = False
    empty: bool = False

    @property
    def skips(self) -> bool:
        """No rank updates."""
        return self.overflow or self.empty


@dataclass(frozen=True)
class UpdateRules:
    """How a trainer updates; see `Trainer`, whose arguments these are."""

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None
    clip_norm: float | None = None
    norm_type: float = 2.0
    error_if_nonfinite: bool = False
    scaler: torch.amp.GradScaler | None = None
    precision: PrecisionName = "float32"


def make_update(
    trainable: Mapping[str, nn.Parameter],
    names: Sequence[str],
    topology: Topology,
    tied: Mapping[str, tuple[int, ...]],
    transport: Transport,
    device: torch.device,
    rules: UpdateRules,
) -> Update:
    """The update of one rank.

    Args:
        trainable: this rank's trainable parameters by name.
        names: of all parameters of the model.
        topology: this rank's place.
        tied: for each tied parameter of this rank the ranks of all its holders.
        transport: the network.
        device: this rank's device.
        rules: what the user asked for.
    """
    shard, updated = None, trainable
    if topology.stage_plan.shard == "optimizer":
        ranks = topology.ranks[topology.stage]
        shard = OptimizerShard(trainable, ranks, topology.rank, tied, transport)
        updated = shard.own
    optimizer = make_optimizer(rules.optimizer, Parameters(updated, names))
    clipping = None
    if rules.clip_norm is not None:
        counted = counted_here(topology, trainable, tied)
        clipping = Clipping(
            trainable, counted, rules.clip_norm, rules.norm_type, rules.error_if_nonfinite
        )
    scaler = rules.scaler
    if scaler is None and rules.precision == "fp16":
        scaler = torch.amp.GradScaler(device.type)
    return Update(
        list(trainable.values()),
        optimizer,
        shard,
        make_scheduler(rules.scheduler, optimizer),
        clipping,
        scaler if scaler is not None and scaler.is_enabled() else None,
        transport,
        device,
    )


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
        self.optimizer = optimizer
        self._shard = shard
        self.scheduler = scheduler
        self._clipping = clipping
        self.scaler = scaler
        self._transport = transport
        self._device = device

    @property
    def writes(self) -> bool:
        """This rank has something to update, or to get from replicas that did."""
        return self.optimizer is not None or self._shard is not None

    def agree(self) -> Verdict:
        """Look at the summed gradients; all ranks call it, and come to the same verdict.

        Sets the loss scale of the next step too.

        Raises:
            RunError: their norm is not finite, and that was to be an error.
        """
        if self._clipping is None and self.scaler is None:
            return Verdict()
        # A slot for each rank's norm, and the number of ranks with an overflow.
        size = self._transport.world_size
        slots = torch.zeros(size + 1, dtype=torch.float64)
        if self.scaler is not None:
            gradients = self._gradients()
            slots[size] = float(overflowed(gradients))
            unscale(self.scaler, gradients)
        if self._clipping is not None:
            slots[self._transport.rank] = self._clipping.local_norm()
        slots = slots.to(self._device)
        self._transport.sum(slots, tuple(range(size))).wait()
        overflow = bool(slots[size])
        if self.scaler is not None:
            adapt(self.scaler, overflow)
        norm = None
        if self._clipping is not None:
            norm = self._clipping.total_norm(slots[:size])
            if not overflow:
                self._clipping.check(norm)
        return Verdict(norm, overflow)

    def apply(self, verdict: Verdict) -> None:
        """Update this rank's parameters, unless no rank does."""
        if verdict.skips:
            return
        if self._clipping is not None and verdict.gradient_norm is not None:
            self._clipping.clip(verdict.gradient_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self._shard is not None:
            self._shard.spread()
        if self.scheduler is not None:
            self.scheduler.step()

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]
