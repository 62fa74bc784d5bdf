"""Boundary tensors between this rank and its peers: receives posted ahead, sends kept alive.

Memory is bounded by the micro-batches in flight, whatever their number in a step: activations are
received at most K_i + 1 micro-batches ahead of their backward, gradients at most 2
(docs/semantics.md, rules 4 and 5). Between two stages of one rank tensors are handed over. A sent activation is waited for when the backward of its
micro-batch is done, because its reader must have had it by then; so a stage never waits for a later
stage to make room, only gradient sends wait for an earlier one, and no circle can arise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import torch

from dapple.graph import BoundaryTensor
from dapple.runtime.layout import Layout, Piece
from dapple.runtime.topology import Topology
from dapple.runtime.transport import Done, Pending, Transport
from dapple.schedule import Message

_Sends = list[tuple[Pending, torch.Tensor]]


class Boundaries:
    """Which boundary tensors a stage of this rank reads and makes, and with which stages.

    Attributes:
        stage: the stage.
        reads: (tensor, its producer's stage).
        makes: (tensor, its consumers' stages, ascending).
        producers, consumers: the stages of all reads, of all makes, ascending.
    """

    def __init__(
        self,
        topology: Topology,
        stage: int,
        reads: Iterable[BoundaryTensor],
        makes: Iterable[BoundaryTensor],
    ) -> None:
        stage_of = topology.stage_of_layer
        self.stage = stage
        self.reads = [(t, stage_of(t.producer)) for t in reads]
        self.makes = [
            (t, sorted({stage_of(layer) for layer in t.consumers} - {stage})) for t in makes
        ]
        self.producers = sorted({producer for _, producer in self.reads})
        self.consumers = sorted({consumer for _, stages in self.makes for consumer in stages})


class Exchange:
    """The messages of one step of one rank.

    Args:
        transport: the network.
        layout: the rows of this step.
        boundaries: per stage of this rank its boundary tensors.
        device: where buffers are made.
        send_limits: per stage, micro-batches whose gradients may be under way before the oldest is
            waited for.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        boundaries: Mapping[int, Boundaries],
        device: torch.device,
        send_limits: Mapping[int, int],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._boundaries = boundaries
        self._device = device
        self._send_limits = send_limits
        self._incoming: dict[Message, dict[str, _Incoming]] = {}
        self._outputs: dict[tuple[int, int], _Sends] = {}
        self._gradient_sends: dict[int, deque[_Sends]] = {s: deque() for s in boundaries}

    @property
    def live_bytes(self) -> int:
        """Bytes of boundary buffers that are posted, and of sends that are under way."""
        incoming = [i for message in self._incoming.values() for i in message.values()]
        groups = list(self._outputs.values())
        for sends in self._gradient_sends.values():
            groups += sends
        sending = [t for group in groups for _, t in group]
        return sum(i.num_bytes for i in incoming) + sum(t.nbytes for t in sending)

    def post(self, message: Message) -> None:
        """Post the receives of a message's tensors, in the order they are sent."""
        self._incoming[message] = {
            tensor.name: self._receive(tensor, message) for tensor in self._expected(message)
        }

    def take_inputs(self, stage: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Wait for a micro-batch's activations: this replica's rows, by tensor name."""
        taken: dict[str, torch.Tensor] = {}
        for producer in self._boundaries[stage].producers:
            slot = self._incoming.pop(Message(producer, stage, False, micro_batch))
            taken |= {name: incoming.take() for name, incoming in slot.items()}
        return taken

    def take_gradients(self, stage: int, micro_batch: int) -> list[torch.Tensor | None]:
        """Wait for the gradients of what a stage made; those of several consumers are added up."""
        boundaries = self._boundaries[stage]
        slots = {
            consumer: self._incoming.pop(Message(consumer, stage, True, micro_batch), {})
            for consumer in boundaries.consumers
        }
        return [
            _added([slots[c][tensor.name] for c in consumers if tensor.name in slots[c]])
            for tensor, consumers in boundaries.makes
        ]

    def send_outputs(self, stage: int, micro_batch: int, made: Iterable[torch.Tensor]) -> None:
        """Send what a stage made to the replicas that read its rows."""
        boundaries, values = self._boundaries[stage], list(made)
        # gloo drops a send whose handle is gone, and does not copy its tensor: keep both.
        sends: _Sends = []
        for consumer in boundaries.consumers:
            parts = [
                (tensor, value)
                for value, (tensor, stages) in zip(values, boundaries.makes, strict=True)
                if consumer in stages
            ]
            sends += self._send(Message(stage, consumer, False, micro_batch), parts)
        self._outputs[stage, micro_batch] = sends

    def release_outputs(self, stage: int, micro_batch: int) -> None:
        """Wait until a micro-batch's outputs are sent, and forget them."""
        _wait(self._outputs.pop((stage, micro_batch)))

    def send_gradients(
        self, stage: int, micro_batch: int, gradients: Iterable[torch.Tensor | None]
    ) -> None:
        """Send the gradients of what a stage read back to where it came from."""
        boundaries, values = self._boundaries[stage], list(gradients)
        sends: _Sends = []
        for producer in boundaries.producers:
            parts = [
                (tensor, value)
                for value, (tensor, source) in zip(values, boundaries.reads, strict=True)
                if source == producer and value is not None
            ]
            sends += self._send(Message(stage, producer, True, micro_batch), parts)
        under_way = self._gradient_sends[stage]
        under_way.append(sends)
        while len(under_way) > self._send_limits[stage]:
            _wait(under_way.popleft())

    def finish(self) -> None:
        """Wait for everything that is still being sent."""
        for stage, micro_batch in list(self._outputs):
            self.release_outputs(stage, micro_batch)
        for under_way in self._gradient_sends.values():
            while under_way:
                _wait(under_way.popleft())

    def _expected(self, message: Message) -> list[BoundaryTensor]:
        boundaries = self._boundaries[message.target]
        if message.is_gradient:
            return [t for t, c in boundaries.makes if message.source in c and t.needs_grad]
        return [t for t, producer in boundaries.reads if producer == message.source]

    def _send(self, message: Message, parts: list[tuple[BoundaryTensor, torch.Tensor]]) -> _Sends:
        if message.target in self._boundaries:
            # Two stages of one rank: handed over, each reader with a tensor of its own.
            slot = {tensor.name: _Incoming.handed_over(tensor, value) for tensor, value in parts}
            self._incoming[message] = slot
            return []
        sends: _Sends = []
        stages = message.source, message.target
        for tensor, value in parts:
            for piece in self._pieces(tensor, message.micro_batch, *stages):
                part = _rows_of(value, tensor, piece).contiguous()
                sends.append((self._transport.send(part, piece.peer, stages), part))
        return sends

    def _receive(self, tensor: BoundaryTensor, message: Message) -> _Incoming:
        incoming = _Incoming(tensor)
        stages = message.source, message.target
        for piece in self._pieces(tensor, message.micro_batch, *stages[::-1]):
            buffer = torch.empty(
                tensor.shape_for(self._layout.sized(piece.stop - piece.start)),
                dtype=tensor.dtype,
                device=self._device,
            )
            incoming.add(self._transport.receive(buffer, piece.peer, stages), buffer)
        return incoming

    def _pieces(self, tensor: BoundaryTensor, m: int, here: int, there: int) -> list[Piece]:
        return self._layout.pieces(m, here, there, tensor.row_dim is not None)


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

    @classmethod
    def handed_over(cls, tensor: BoundaryTensor, value: torch.Tensor) -> _Incoming:
        """One that is here already, from a stage of the same rank."""
        incoming = cls(tensor)
        incoming.add(Done(), value.detach())
        return incoming

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
