"""Buffers that a stage's forward writes into, such as running statistics: the same on all replicas."""

from __future__ import annotations

import torch
from torch import nn

from dapple.runtime.layout import Layout
from dapple.runtime.statistics import BatchNormRule
from dapple.runtime.topology import Topology
from dapple.runtime.transport import STATISTICS, Transport


class WrittenBuffers:
    """The buffers of one stage that its forward writes into.

    Replicas write the same, with two exceptions: one without rows of a micro-batch writes nothing,
    and with the rule "local" each has statistics of its own. Then those of the first replica that has
    rows of every micro-batch count.

    Args:
        module: the stage.
        names: of these buffers in it.
        topology: this rank's place.
        transport: the network.
        rule: of batch norms.
    """

    def __init__(
        self,
        module: nn.Module,
        names: tuple[str, ...],
        topology: Topology,
        transport: Transport,
        rule: BatchNormRule,
    ) -> None:
        self._ranks = topology.ranks[topology.stage]
        self._replica = topology.replica
        self._transport = transport
        self._always = rule == "local"
        self._buffers = [module.get_buffer(name) for name in names]

    def equalise(self, layout: Layout) -> None:
        """After a step's last forward; all replicas call it."""
        if len(self._ranks) == 1 or not (self._always or layout.has_absent):
            return
        for dtype in dict.fromkeys(b.dtype for b in self._buffers):
            members = [b for b in self._buffers if b.dtype == dtype]
            flat = torch.cat([b.reshape(-1) for b in members])
            sent = flat.to(torch.uint8) if dtype == torch.bool else flat
            if self._replica != layout.always_present:
                sent = torch.zeros_like(sent)
            self._transport.sum(sent, self._ranks, STATISTICS).wait()
            parts = sent.to(dtype).split([b.numel() for b in members])
            for buffer, part in zip(members, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
