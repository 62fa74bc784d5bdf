"""The optimizer's state shared out among the replicas of a stage (ZeRO stage 1).

    parameter       a    b    c    d           largest first, each to the replica with least so far
    replica 0       own       own        -->   updates a and c, sends them, receives b and d
    replica 1            own       own   -->   updates b and d, sends them, receives a and c

Every replica still holds all parameters and gradients. A parameter that other stages hold too is
updated by every replica, as they do.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import nn

from dapple.costs import shard_owners
from dapple.runtime.transport import Pending, Transport

MESSAGE_BYTES = 4 * 2**20
"""Small parameters travel together until a message has these many bytes."""


class OptimizerShard:
    """What one replica updates, and how the others learn of it.

    Args:
        parameters: the stage's trainable parameters by name, in the same order on all replicas.
        ranks: the replicas of the stage.
        rank: this rank.
        everywhere: names of those that every replica updates.
        transport: the network.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ranks: tuple[int, ...],
        rank: int,
        everywhere: Container[str],
        transport: Transport,
    ) -> None:
        shared = {name: p for name, p in parameters.items() if name not in everywhere}
        owners = shard_owners([p.nbytes for p in shared.values()], len(ranks))
        self._ranks = ranks
        self._rank = rank
        self._transport = transport
        of_rank: dict[int, list[nn.Parameter]] = {r: [] for r in ranks}
        others = set()
        for (name, parameter), owner in zip(shared.items(), owners, strict=True):
            of_rank[ranks[owner]].append(parameter)
            if ranks[owner] != rank:
                others.add(name)
        self.own = {name: p for name, p in parameters.items() if name not in others}
        self._messages = {r: list(_messages(members)) for r, members in of_rank.items()}

    def spread(self) -> None:
        """Give every replica what the others have updated; all of them call it."""
        if len(self._ranks) == 1:
            return
        # One message of each owner at a time, so that little is held twice.
        for number in range(max(map(len, self._messages.values()), default=0)):
            turn = [(r, m[number]) for r, m in self._messages.items() if number < len(m)]
            started = [self._start(owner, members) for owner, members in turn]
            for (owner, members), (buffer, pending) in zip(turn, started, strict=True):
                pending.wait()
                if owner != self._rank:
                    _unpack(buffer, members)

    def _start(self, owner: int, members: Sequence[nn.Parameter]) -> tuple[torch.Tensor, Pending]:
        first = members[0]
        if owner == self._rank:
            buffer = torch.cat([p.detach().reshape(-1) for p in members])
        else:
            size = sum(p.numel() for p in members)
            buffer = torch.empty(size, dtype=first.dtype, device=first.device)
        return buffer, self._transport.broadcast(buffer, owner, self._ranks)


def _messages(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype that travel together."""
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        message: list[nn.Parameter] = []
        for parameter in (p for p in parameters if p.dtype == dtype):
            message.append(parameter)
            if sum(p.nbytes for p in message) >= MESSAGE_BYTES:
                yield message
                message = []
        if message:
            yield message


def _unpack(buffer: torch.Tensor, members: Sequence[nn.Parameter]) -> None:
    parts = buffer.split([p.numel() for p in members])
    with torch.no_grad():
        for parameter, part in zip(members, parts, strict=True):
            parameter.copy_(part.view_as(parameter))
