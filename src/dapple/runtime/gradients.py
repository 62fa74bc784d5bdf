"""Gradients in flat buffers, summed over the ranks that hold the same parameters.

    stage's own parameters   --> buffer per dtype --> AllReduce over the stage's replicas
    tied parameter           --> buffer           --> AllReduce over all ranks that hold it

Each parameter's `.grad` is a view into its buffer: nothing is copied for the AllReduce, and a rank
without a gradient adds zeros. A parameter that got none on any rank has none in the end, so that
the optimizer skips it as on one device (it would otherwise decay it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dapple.runtime.transport import Pending, Transport

BUCKET_BYTES = 25 * 2**20


@dataclass
class _Group:
    """Parameters whose gradients are summed over the same ranks.

    `found` has one number per parameter: how many ranks had a gradient.
    """

    parameters: list[nn.Parameter]
    views: list[torch.Tensor]
    buffer: torch.Tensor
    found: torch.Tensor
    ranks: tuple[int, ...]


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
        self._groups: list[_Group] = []
        self._touched: set[int] = set()
        own = [p for name, p in parameters.items() if name not in tied_ranks]
        for dtype in dict.fromkeys(p.dtype for p in own):
            self._add([p for p in own if p.dtype == dtype], stage_ranks)
        for name, ranks in tied_ranks.items():
            self._add([parameters[name]], ranks)

    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers."""
        return [group.buffer for group in self._groups]

    def attach(self) -> None:
        """Point every `.grad` at its view; an optimizer's zero_grad may have dropped it."""
        for group in self._groups:
            for parameter, view in zip(group.parameters, group.views, strict=True):
                parameter.grad = view

    def zero(self) -> None:
        """Start a new sum."""
        self._touched.clear()
        for group in self._groups:
            group.buffer.zero_()

    def start_sums(self, transport: Transport) -> list[Pending]:
        """Start the AllReduce of all gradients, in buckets."""
        pending = []
        for group in self._groups:
            found = [float(id(p) in self._touched) for p in group.parameters]
            group.found.copy_(torch.tensor(found))
            pending.append(transport.sum(group.found, group.ranks))
            pending += [transport.sum(b, group.ranks) for b in _buckets(group.buffer)]
        return pending

    def detach_missing(self) -> None:
        """After the sums: a parameter that got no gradient on any rank has none."""
        for group in self._groups:
            for parameter, count in zip(group.parameters, group.found.tolist(), strict=True):
                if not count:
                    parameter.grad = None

    def _add(self, parameters: Sequence[nn.Parameter], ranks: tuple[int, ...]) -> None:
        first = parameters[0]
        size = sum(p.numel() for p in parameters)
        buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
        views = []
        position = 0
        for parameter in parameters:
            views.append(buffer[position : position + parameter.numel()].view(parameter.shape))
            position += parameter.numel()
            parameter.register_post_accumulate_grad_hook(lambda p: self._touched.add(id(p)))
        found = torch.zeros(len(parameters), device=first.device)
        self._groups.append(_Group(list(parameters), views, buffer, found, ranks))


def _buckets(buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from buffer.split(max(1, BUCKET_BYTES // buffer.element_size()))
