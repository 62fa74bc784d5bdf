"""Messages and sums between ranks, over `torch.distributed`.

Order is all that identifies a message: between two ranks and in one direction messages are first
in, first out. NCCL has no tags, so none are used on gloo either.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

GRADIENTS, STATISTICS = 0, 1
"""Channels of sums: of gradients and losses, and of batch statistics in the midst of actions."""


PIECE_BYTES = 4 * 2**20
"""Most bytes of a sum on gloo. Measured over links of 500 Mbit/s: a step with pieces of 4 MiB was
about 1 % faster than with whole buckets of 8 MiB, and 2 % than with pieces of 1 MiB, in one run."""


class Pending(Protocol):
    """A transfer or sum under way."""

    def wait(self) -> object:
        """Return when it is done."""


class Transport(Protocol):
    """What the runtime needs of a network."""

    rank: int
    world_size: int

    def send(self, tensor: torch.Tensor, peer: int, stages: tuple[int, int]) -> Pending:
        """Start sending a contiguous tensor. Keep it and the result until `wait` has returned."""

    def receive(self, buffer: torch.Tensor, peer: int, stages: tuple[int, int]) -> Pending:
        """Start receiving into a contiguous buffer of exactly the message's size."""

    def sum(self, tensor: torch.Tensor, ranks: Sequence[int], channel: int = GRADIENTS) -> Pending:
        """Start adding up a tensor over `ranks`, in place on each. Every one must call it.

        Sums of one channel over the same ranks must be started in the same order on each.
        """

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Sequence[int]) -> Pending:
        """Start copying the tensor of `source` to those of the other `ranks`, which all call it."""


class DistributedTransport:
    """`Transport` over an initialised process group.

    Groups are made here, once, by all ranks in one order: creation in an order that depends on
    timing is a known way to hang. On gloo, point-to-point messages use the world's group. Other
    backends get a communicator for each pair of stages and direction, because NCCL runs the
    messages of a communicator one after the other: with one for both directions, two neighbours
    that both receive first would wait for each other. (Never run on NCCL so far.)

    Args:
        sum_groups: sets of ranks that will sum gradients together, in the same order on all ranks.
        statistics_groups: sets of ranks that will sum batch statistics together, in the same order.
        stage_pairs: (producer stage, consumer stage) that exchange tensors.
        ranks_of_stage: the ranks of each stage.
    """

    def __init__(
        self,
        sum_groups: Sequence[tuple[int, ...]],
        stage_pairs: Sequence[tuple[int, int]],
        ranks_of_stage: Sequence[tuple[int, ...]],
        statistics_groups: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        everyone = tuple(range(self.world_size))
        self._sums: dict[tuple[int, tuple[int, ...]], dist.ProcessGroup | None] = {
            (GRADIENTS, everyone): None
        }
        keys = [(GRADIENTS, ranks) for ranks in sum_groups]
        for key in [*keys, *((STATISTICS, ranks) for ranks in statistics_groups)]:
            if key not in self._sums and len(key[1]) > 1:
                self._sums[key] = dist.new_group(list(key[1]))
        self._piece_bytes = PIECE_BYTES if dist.get_backend() == "gloo" else None
        self._pairs: dict[tuple[int, int], dist.ProcessGroup | None] = {}
        for pair in itertools.chain.from_iterable((p, p[::-1]) for p in stage_pairs):
            if dist.get_backend() == "gloo":
                self._pairs[pair] = None
            else:
                members = sorted({*ranks_of_stage[pair[0]], *ranks_of_stage[pair[1]]})
                self._pairs[pair] = dist.new_group(members)

    def send(self, tensor: torch.Tensor, peer: int, stages: tuple[int, int]) -> Pending:
        """Start sending to `peer`; `stages` are (own stage, the peer's)."""
        return _started(dist.isend(tensor, dst=peer, group=self._pairs[stages]))

    def receive(self, buffer: torch.Tensor, peer: int, stages: tuple[int, int]) -> Pending:
        """Start receiving from `peer`; `stages` are (the peer's, own stage)."""
        return _started(dist.irecv(buffer, src=peer, group=self._pairs[stages]))

    def sum(self, tensor: torch.Tensor, ranks: Sequence[int], channel: int = GRADIENTS) -> Pending:
        """Start an AllReduce (SUM) over `ranks`; a rank alone has nothing to add."""
        if len(ranks) == 1:
            return Done()
        group = self._sums[channel, tuple(ranks)]
        started = [
            _started(dist.all_reduce(piece, op=dist.ReduceOp.SUM, group=group, async_op=True))
            for piece in pieces(tensor, self._piece_bytes)
        ]
        return started[0] if len(started) == 1 else _All(started)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Sequence[int]) -> Pending:
        """Start a broadcast from the rank `source` over `ranks`, the group of a sum."""
        group = self._sums[GRADIENTS, tuple(ranks)]
        return _started(dist.broadcast(tensor, src=source, group=group, async_op=True))


class Done:
    """A transfer that is over already."""

    def wait(self) -> None:
        """Return at once."""


class _All:
    """Several transfers as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Return when all are over."""
        for part in self._parts:
            part.wait()


def pieces(tensor: torch.Tensor, piece_bytes: int | None) -> Sequence[torch.Tensor]:
    """A contiguous tensor as views of at most so many bytes; None: as it is."""
    if piece_bytes is None or tensor.nbytes <= piece_bytes:
        return [tensor]
    found: Sequence[torch.Tensor] = tensor.view(-1).split(piece_bytes // tensor.element_size())
    return found


def _started(work: dist.Work | None) -> Pending:
    if work is None:
        raise AssertionError("this rank is not in the group that it communicates in")
    return work
