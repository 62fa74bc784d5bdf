"""Gradients in flat buffers, summed over the ranks that hold the same parameters.

    stage's own parameters   --> buffer per dtype, cut in buckets --> AllReduce over the replicas
    tied parameter           --> buffer                           --> AllReduce over all holders

Each parameter's `.grad` is a view into its buffer: nothing is copied for the AllReduce. The first
gradient of a step is written over what the view holds, later ones are added, so no time goes into
zeros at the begin of a step. A rank without a gradient adds zeros. A parameter that got none on any
rank has none in the end, so that the optimizer skips it as on one device (it would otherwise decay
it).

Buckets hold parameters in the order in which a backward completes them, and are summed in that
order, each as soon as it and those before it are complete in the last micro-batch's backward
(docs/semantics.md, rule 7). All replicas start the same sums in the same order, whatever their
autograd does: one that has no rows then, or no gradient for some parameter, starts what is left
when the backward is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dapple.costs import bucket_bytes
from dapple.runtime.transport import Pending, Transport


@dataclass
class _Group:
    """Parameters whose gradients are summed over the same ranks.

    `found` has one number per parameter: how many ranks had a gradient.
    """

    parameters: list[nn.Parameter]
    buffer: torch.Tensor
    found: torch.Tensor
    ranks: tuple[int, ...]


@dataclass
class _Bucket:
    """A piece of a buffer, and how many of its parameters the last backward has yet to complete."""

    gradients: torch.Tensor
    ranks: tuple[int, ...]
    size: int
    missing: int
    place: int


class GradientBuffers:
    """The gradients of one rank.

    Args:
        parameters: this rank's trainable parameters by name, in the order in which the forward
            first uses them: the backward completes the last one first.
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
        self._views: dict[int, torch.Tensor] = {}
        self._touched: set[int] = set()
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._transport: Transport | None = None
        self._complete: set[int] = set()
        self._started: list[Pending] = []
        self._pending: list[Pending] = []
        place = {id(parameter): n for n, parameter in enumerate(parameters.values())}
        own = [p for name, p in reversed(list(parameters.items())) if name not in tied_ranks]
        for dtype in dict.fromkeys(p.dtype for p in own):
            group = self._add([p for p in own if p.dtype == dtype], stage_ranks)
            self._cut(group, place)
        # The bucket that is complete first goes first, whichever dtype it has.
        self._buckets.sort(key=lambda bucket: -bucket.place)
        for name, ranks in tied_ranks.items():
            self._add([parameters[name]], ranks)

    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers."""
        return [group.buffer for group in self._groups]

    def attach(self) -> None:
        """Go on with a sum: `.grad` is where it was; an optimizer's zero_grad may have dropped it."""
        for parameter in self._parameters():
            touched = id(parameter) in self._touched
            parameter.grad = self._views[id(parameter)] if touched else None

    def zero(self) -> None:
        """Start a new sum: what comes first to each parameter is written over the old one."""
        self._touched.clear()
        self._started, self._pending = [], []
        for parameter in self._parameters():
            parameter.grad = None

    @contextmanager
    def summing(self, transport: Transport) -> Iterator[None]:
        """Around the last backward before the update: sum what it completes, then the rest."""
        self._transport = transport
        self._complete.clear()
        for bucket in self._buckets:
            bucket.missing = bucket.size
        try:
            yield
        finally:
            self._transport = None
        self._pending = self.start_sums(transport)

    def wait(self) -> None:
        """Wait for all sums. A parameter that got no gradient on any rank has none then."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        for group in self._groups:
            for parameter, count in zip(group.parameters, group.found.tolist(), strict=True):
                if not count:
                    parameter.grad = None

    def start_sums(self, transport: Transport) -> list[Pending]:
        """Start the sums that have not been started yet; returns all that are under way."""
        for parameter in self._parameters():
            if id(parameter) not in self._touched:
                parameter.grad = self._views[id(parameter)]
                # What is complete may be on its way, and has been zeroed.
                if id(parameter) not in self._complete:
                    parameter.grad.zero_()
        pending, self._started = self._started, []
        for bucket in self._buckets[len(pending) :]:
            pending.append(transport.sum(bucket.gradients, bucket.ranks))
        for group in self._groups:
            if id(group.parameters[0]) not in self._bucket_of:
                pending.append(transport.sum(group.buffer, group.ranks))
            found = [float(id(p) in self._touched) for p in group.parameters]
            group.found.copy_(torch.tensor(found))
            pending.append(transport.sum(group.found, group.ranks))
        return pending

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._groups:
            yield from group.parameters

    def _add(self, parameters: Sequence[nn.Parameter], ranks: tuple[int, ...]) -> _Group:
        first = parameters[0]
        size = sum(p.numel() for p in parameters)
        buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
        position = 0
        for parameter in parameters:
            view = buffer[position : position + parameter.numel()].view(parameter.shape)
            self._views[id(parameter)] = view
            position += parameter.numel()
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        found = torch.zeros(len(parameters), device=first.device)
        group = _Group(list(parameters), buffer, found, ranks)
        self._groups.append(group)
        return group

    def _cut(self, group: _Group, place: Mapping[int, int]) -> None:
        enough = bucket_bytes(group.buffer.nbytes)
        start = stop = 0
        inside: list[nn.Parameter] = []
        for number, parameter in enumerate(group.parameters, 1):
            inside.append(parameter)
            stop += parameter.numel()
            piece = group.buffer[start:stop]
            if piece.nbytes >= enough or number == len(group.parameters):
                last = place[id(parameter)]
                bucket = _Bucket(piece, group.ranks, len(inside), len(inside), last)
                self._buckets.append(bucket)
                self._bucket_of.update({id(p): bucket for p in inside})
                start, inside = stop, []

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """A backward has made this parameter's gradient, added to it, or found that it has none."""
        view, gradient = self._views[id(parameter)], parameter.grad
        if gradient is not None:
            if gradient is not view:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                parameter.grad = view
            self._touched.add(id(parameter))
        bucket = self._bucket_of.get(id(parameter))
        if self._transport is None or bucket is None:
            return
        assert id(parameter) not in self._complete, "one backward adds to each gradient once"
        self._complete.add(id(parameter))
        if gradient is None:
            view.zero_()
        bucket.missing -= 1
        for ready in self._buckets[len(self._started) :]:
            if ready.missing:
                break
            self._started.append(self._transport.sum(ready.gradients, ready.ranks))
