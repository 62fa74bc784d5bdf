"""Boundary tensors between this rank and its peers: receives posted ahead, sends kept alive.

Memory is bounded by the micro-batches in flight, whatever their number in a step: activations are
received at most K_i + 1 micro-batches ahead of their backward, gradients at most 2
(docs/semantics.md, rules 4 and 5). A sent activation is waited for when the backward of its
micro-batch is done, because its reader must have had it by then; so a stage never waits for a later
stage to make room, only gradient sends wait for an earlier one, and no circle can arise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from dapple.graph import BoundaryTensor
from dapple.runtime.layout import Layout, Piece
from dapple.runtime.topology import Topology
from dapple.runtime.transport import Pending, Transport

_Sends = list[tuple[Pending, torch.Tensor]]


class Boundaries:
    """Which boundary tensors this rank's stage reads and makes, and with which stages.

    Attributes:
        reads: (tensor, its producer's stage).
        makes: (tensor, its consumers' stages, ascending).
    """

    def __init__(
        self,
        topology: Topology,
        reads: Iterable[BoundaryTensor],
        makes: Iterable[BoundaryTensor],
    ) -> None:
        stage_of = topology.stage_of_layer
        self.reads = [(t, stage_of(t.producer)) for t in reads]
        self.makes = [
            (t, sorted({stage_of(layer) for layer in t.consumers} - {topology.stage}))
            for t in makes
        ]


class Exchange:
    """The messages of one step of one rank.

    Args:
        transport: the network.
        layout: the rows of this step.
        boundaries: the stage's boundary tensors.
        device: where buffers are made.
        send_limit: micro-batches whose gradients may be under way before the oldest is waited for.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        boundaries: Boundaries,
        device: torch.device,
        send_limit: int,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._boundaries = boundaries
        self._device = device
        self._send_limit = send_limit
        self._stage = layout.topology.stage
        self._inputs: dict[int, dict[str, _Incoming]] = {}
        self._gradients: dict[int, list[list[_Incoming]]] = {}
        self._outputs: dict[int, _Sends] = {}
        self._gradient_sends: deque[_Sends] = deque()

    @property
    def live_bytes(self) -> int:
        """Bytes of boundary buffers that are posted, and of sends that are under way."""
        incoming = [i for slot in self._inputs.values() for i in slot.values()]
        incoming += [i for slot in self._gradients.values() for row in slot for i in row]
        groups = [*self._outputs.values(), *self._gradient_sends]
        sending = [t for group in groups for _, t in group]
        return sum(i.num_bytes for i in incoming) + sum(t.nbytes for t in sending)

    def post_inputs(self, micro_batch: int) -> None:
        """Post the receives of a micro-batch's activations, in the order they are sent."""
        self._inputs[micro_batch] = {
            tensor.name: self._post(tensor, micro_batch, stage)
            for tensor, stage in self._boundaries.reads
        }

    def take_inputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """Wait for a micro-batch's activations: this replica's rows, by tensor name."""
        slot = self._inputs.pop(micro_batch)
        return {name: incoming.take() for name, incoming in slot.items()}

    def post_gradients(self, micro_batch: int) -> None:
        """Post the receives of the gradients of what this stage made for a micro-batch."""
        self._gradients[micro_batch] = [
            [self._post(tensor, micro_batch, stage) for stage in stages]
            if tensor.needs_grad
            else []
            for tensor, stages in self._boundaries.makes
        ]

    def take_gradients(self, micro_batch: int) -> list[torch.Tensor | None]:
        """Wait for these gradients; those of several consumers are added up."""
        return [_added(row) for row in self._gradients.pop(micro_batch)]

    def send_outputs(self, micro_batch: int, made: Iterable[torch.Tensor]) -> None:
        """Send what this stage made to the replicas that read its rows."""
        # gloo drops a send whose handle is gone, and does not copy its tensor: keep both.
        self._outputs[micro_batch] = [
            sent
            for value, (tensor, stages) in zip(made, self._boundaries.makes, strict=True)
            for stage in stages
            for sent in self._send(value, tensor, micro_batch, stage)
        ]

    def release_outputs(self, micro_batch: int) -> None:
        """Wait until a micro-batch's outputs are sent, and forget them."""
        _wait(self._outputs.pop(micro_batch))

    def send_gradients(self, micro_batch: int, gradients: Iterable[torch.Tensor | None]) -> None:
        """Send the gradients of what this stage read back to where it came from."""
        self._gradient_sends.append(
            [
                sent
                for value, (tensor, stage) in zip(gradients, self._boundaries.reads, strict=True)
                if value is not None
                for sent in self._send(value, tensor, micro_batch, stage)
            ]
        )
        while len(self._gradient_sends) > self._send_limit:
            _wait(self._gradient_sends.popleft())

    def finish(self) -> None:
        """Wait for everything that is still being sent."""
        for micro_batch in list(self._outputs):
            self.release_outputs(micro_batch)
        while self._gradient_sends:
            _wait(self._gradient_sends.popleft())

    def _send(
        self, value: torch.Tensor, tensor: BoundaryTensor, micro_batch: int, stage: int
    ) -> _Sends:
        sends: _Sends = []
        for piece in self._layout.pieces(micro_batch, stage, tensor.row_dim is not None):
            part = _rows_of(value, tensor, piece).contiguous()
            stages = (self._stage, stage)
            sends.append((self._transport.send(part, piece.peer, stages), part))
        return sends

    def _post(self, tensor: BoundaryTensor, micro_batch: int, stage: int) -> _Incoming:
        pieces = self._layout.pieces(micro_batch, stage, tensor.row_dim is not None)
        incoming = _Incoming(tensor)
        for piece in pieces:
            buffer = torch.empty(
                tensor.shape_for(self._layout.sized(piece.stop - piece.start)),
                dtype=tensor.dtype,
                device=self._device,
            )
            pending = self._transport.receive(buffer, piece.peer, (stage, self._stage))
            incoming.add(pending, buffer)
        return incoming


def _wait(sends: _Sends) -> None:
    for pending, _ in sends:
        pending.wait()


class _Incoming:
    """One boundary tensor on its way, in pieces."""

    def __init__(self, tensor: BoundaryTensor) -> None:
        self._tensor = tensor
        self._parts: list[tuple[Pending, torch.Tensor]] = []

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for _, buffer in self._parts)

    def add(self, pending: Pending, buffer: torch.Tensor) -> None:
        self._parts.append((pending, buffer))

    def take(self) -> torch.Tensor:
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
        return not self._parts


def _added(row: list[_Incoming]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for incoming in row:
        if incoming.is_empty:
            continue
        value = incoming.take()
        total = value if total is None else total + value
    return total


def _rows_of(value: torch.Tensor, tensor: BoundaryTensor, piece: Piece) -> torch.Tensor:
    if tensor.row_dim is None:
        return value
    return value.narrow(tensor.row_dim, piece.start, piece.stop - piece.start)
