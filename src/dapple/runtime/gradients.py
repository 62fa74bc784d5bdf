"""Gradients in flat buffers, summed over the ranks that hold the same parameters.

    stage's own parameters   --> buffer per dtype --> AllReduce over the stage's replicas
    tied parameter           --> buffer           --> AllReduce over all ranks that hold it

Each parameter's `.grad` is a view into its buffer: nothing is copied for the AllReduce, and a
parameter without a gradient counts as zeros everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from dapple.runtime.transport import Pending, Transport

BUCKET_BYTES = 25 * 2**20


class GradientBuffers:
    """The gradients of one rank.

    Args:
        parameters: this rank's trainable parameters by name.
        stage_ranks: the replicas of this rank's stage.
        tied_ranks: for each tied parameter of this rank the ranks of all its holders, in the same
            order on every holder.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        stage_ranks: tuple[int, ...],
        tied_ranks: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._views: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._buffers: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        own = [p for name, p in parameters.items() if name not in tied_ranks]
        for dtype in dict.fromkeys(p.dtype for p in own):
            self._add([p for p in own if p.dtype == dtype], stage_ranks)
        for name, ranks in tied_ranks.items():
            self._add([parameters[name]], ranks)

    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers."""
        return [buffer for buffer, _ in self._buffers]

    def attach(self) -> None:
        """Point every `.grad` at its view; an optimizer's zero_grad may have dropped it."""
        for parameter, view in self._views:
            parameter.grad = view

    def zero(self) -> None:
        """Start a new sum."""
        for buffer, _ in self._buffers:
            buffer.zero_()

    def start_sums(self, transport: Transport) -> list[Pending]:
        """Start the AllReduce of all gradients, in buckets."""
        return [
            transport.sum(bucket, ranks)
            for buffer, ranks in self._buffers
            for bucket in _buckets(buffer)
        ]

    def _add(self, parameters: Sequence[nn.Parameter], ranks: tuple[int, ...]) -> None:
        first = parameters[0]
        size = sum(p.numel() for p in parameters)
        buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
        self._buffers.append((buffer, ranks))
        position = 0
        for parameter in parameters:
            view = buffer[position : position + parameter.numel()].view(parameter.shape)
            self._views.append((parameter, view))
            position += parameter.numel()


def _buckets(buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from buffer.split(max(1, BUCKET_BYTES // buffer.element_size()))
