"""Boundary tensors on their way to this rank, piece by piece."""

from __future__ import annotations

import torch

from dapple.graph import BoundaryTensor
from dapple.runtime.transport import Done, Pending


class Flags:
    """What one sender says of the tensors of a message: whether it has each of them.

    Args:
        pending: their transfer.
        buffer: one number per tensor, 0 for none.
    """

    def __init__(self, pending: Pending, buffer: torch.Tensor) -> None:
        self._pending = pending
        self._buffer = buffer
        self._read: list[int] | None = None

    def read(self) -> list[int]:
        """Wait for them; on an accelerator the host waits, too."""
        if self._read is None:
            self._pending.wait()  # once: a second wait on gloo is for a second message
            self._read = self._buffer.tolist()
        return self._read


class Incoming:
    """One boundary tensor on its way, in pieces.

    Args:
        tensor: what is known of it.
    """

    def __init__(self, tensor: BoundaryTensor) -> None:
        self._tensor = tensor
        self._parts: list[tuple[Pending, torch.Tensor]] = []
        self._flags: list[tuple[Flags, int]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers."""
        return sum(buffer.nbytes for _, buffer in self._parts)

    @classmethod
    def handed_over(cls, tensor: BoundaryTensor, value: torch.Tensor) -> Incoming:
        """One that is here already, from a stage of the same rank."""
        incoming = cls(tensor)
        incoming.add(Done(), value.detach())
        return incoming

    def add(self, pending: Pending, buffer: torch.Tensor) -> None:
        """A further piece."""
        self._parts.append((pending, buffer))

    def doubt(self, flags: Flags, place: int) -> None:
        """A sender says at this place of its flags whether it has the tensor at all."""
        self._flags.append((flags, place))

    def is_none(self) -> bool:
        """Wait for the flags: no sender has it."""
        return bool(self._flags) and not any(flags.read()[place] for flags, place in self._flags)

    def take(self) -> torch.Tensor:
        """Wait for the pieces, and put them together."""
        for pending, _ in self._parts:
            pending.wait()
        buffers = [buffer for _, buffer in self._parts]
        self._parts = []
        if len(buffers) == 1:
            return buffers[0]
        if self._tensor.row_dim is None:
            # Gradients of a tensor without rows come from every replica that read it.
            return torch.stack(buffers).sum(0)
        return torch.cat(buffers, dim=self._tensor.row_dim)

    @property
    def is_empty(self) -> bool:
        """Nothing of it is on its way."""
        return not self._parts


def added(row: list[Incoming]) -> torch.Tensor | None:
    """Wait for the gradients of one tensor from several stages, and add them up; None: none has one."""
    total: torch.Tensor | None = None
    for incoming in row:
        if incoming.is_empty:
            continue
        value = incoming.take()  # also where it is zeros in place of none: its buffers are in use
        if not incoming.is_none():
            total = value if total is None else total + value
    return total
