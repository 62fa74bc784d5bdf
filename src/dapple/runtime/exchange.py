"""Boundary tensors between this rank and its peers: receives posted ahead, sends kept alive.

Memory is bounded by the micro-batches in flight, whatever their number in a step: activations are
received at most K_i + 1 micro-batches ahead of their backward, gradients at most 2
(docs/semantics.md, rules 4 and 5). Between two stages of one rank tensors are handed over. A sent
activation is waited for when the backward of its micro-batch is done, because its reader must have
had it by then; so a stage never waits for a later stage to make room, only gradient sends wait for
an earlier one, and no circle can arise.

A tensor that the loss does not depend on has no gradient. Its reader sends zeros, because buffers
are posted ahead, and before them flags that tell so: one per tensor of the message for which that
can happen. Most models have none (dapple.graph.certain), and no flags.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from dapple.graph import BoundaryTensor
from dapple.runtime.incoming import Flags, Incoming, added
from dapple.runtime.layout import Layout, Piece
from dapple.runtime.topology import Topology
from dapple.runtime.transport import Pending, Transport
from dapple.schedule import Message

_Sends = list[tuple[Pending, torch.Tensor]]
_Parts = list[tuple[BoundaryTensor, torch.Tensor | None]]


class Boundaries:
    """Which boundary tensors a stage of this rank reads and makes, and with which stages.

    Attributes:
        stage: the stage.
        reads: (tensor, its producer's stage).
        makes: (tensor, its consumers' stages, ascending).
        producers, consumers: the stages of all reads, of all makes, ascending.
        certain: (tensor, stage that reads it), of all whose gradient from there never lacks.
        in_doubt: some gradient that is sent or received here may lack.
    """

    def __init__(
        self,
        topology: Topology,
        stage: int,
        reads: Iterable[BoundaryTensor],
        makes: Iterable[BoundaryTensor],
        certain: Collection[tuple[str, int]] = (),
    ) -> None:
        stage_of = topology.stage_of_layer
        self.stage = stage
        self.certain = certain
        self.reads = [(t, stage_of(t.producer)) for t in reads]
        self.makes = [
            (t, sorted({stage_of(layer) for layer in t.consumers} - {stage})) for t in makes
        ]
        self.producers = sorted({producer for _, producer in self.reads})
        self.consumers = sorted({consumer for _, stages in self.makes for consumer in stages})
        uses = [(t, stage) for t, _ in self.reads]
        uses += [(t, consumer) for t, consumers in self.makes for consumer in consumers]
        self.in_doubt = any(t.needs_grad and (t.name, reader) not in certain for t, reader in uses)

    @property
    def certain_reads(self) -> set[str]:
        """Names of tensors that this stage reads and is certain to have a gradient for."""
        return {t.name for t, _ in self.reads if (t.name, self.stage) in self.certain}


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
        self._incoming: dict[Message, dict[str, Incoming]] = {}
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
        expected = self._expected(message)
        self._incoming[message] = {tensor.name: Incoming(tensor) for tensor in expected}
        self._receive_flags(message, expected)
        for tensor in expected:
            self._receive(tensor, message)

    def take_inputs(self, stage: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Wait for a micro-batch's activations: this replica's rows, by tensor name."""
        taken: dict[str, torch.Tensor] = {}
        for producer in self._boundaries[stage].producers:
            slot = self._incoming.pop(Message(producer, stage, False, micro_batch))
            taken |= {name: incoming.take() for name, incoming in slot.items()}
        return taken

    def take_gradients(self, stage: int, micro_batch: int) -> list[torch.Tensor | None]:
        """Wait for the gradients of what a stage made; those of several consumers are added up.

        None: the tensor needs none, or the loss does not depend on it.
        """
        boundaries = self._boundaries[stage]
        slots = {
            consumer: self._incoming.pop(Message(consumer, stage, True, micro_batch), {})
            for consumer in boundaries.consumers
        }
        return [
            added([slots[c][tensor.name] for c in consumers if tensor.name in slots[c]])
            for tensor, consumers in boundaries.makes
        ]

    def send_outputs(self, stage: int, micro_batch: int, made: Iterable[torch.Tensor]) -> None:
        """Send what a stage made to the replicas that read its rows."""
        boundaries, values = self._boundaries[stage], list(made)
        # gloo drops a send whose handle is gone, and does not copy its tensor: keep both.
        sends: _Sends = []
        for consumer in boundaries.consumers:
            parts: _Parts = [
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
        """Send the gradients of what a stage read back to where it came from.

        None: the tensor needs none, or the loss does not depend on it.
        """
        boundaries, values = self._boundaries[stage], list(gradients)
        sends: _Sends = []
        for producer in boundaries.producers:
            parts: _Parts = [
                (tensor, value)
                for value, (tensor, source) in zip(values, boundaries.reads, strict=True)
                if source == producer and tensor.needs_grad
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

    def _send(self, message: Message, parts: _Parts) -> _Sends:
        if message.target in self._boundaries:
            # Two stages of one rank: handed over, each reader with a tensor of its own.
            self._incoming[message] = {
                tensor.name: Incoming.handed_over(tensor, value)
                for tensor, value in parts
                if value is not None
            }
            return []
        stages = message.source, message.target
        sends = self._send_flags(message, parts)
        for tensor, value in parts:
            for piece in self._pieces(tensor, message.micro_batch, *stages):
                if value is None:
                    part = self._empty(tensor, piece).zero_()
                else:
                    part = _rows_of(value, tensor, piece).contiguous()
                sends.append((self._transport.send(part, piece.peer, stages), part))
        return sends

    def _send_flags(self, message: Message, parts: _Parts) -> _Sends:
        """Tell who gets gradients of doubtful tensors which of them are none."""
        doubtful = self._doubtful(message, [tensor for tensor, _ in parts])
        if not doubtful:
            return []
        sends: _Sends = []
        stages = message.source, message.target
        given = {tensor.name: value is not None for tensor, value in parts}
        for peer in self._peers(doubtful, message.micro_batch, *stages):
            flags = torch.tensor(
                [given[t.name] for t in doubtful], dtype=torch.uint8, device=self._device
            )
            sends.append((self._transport.send(flags, peer, stages), flags))
        return sends

    def _receive_flags(self, message: Message, expected: Sequence[BoundaryTensor]) -> None:
        stages = message.source, message.target
        doubtful = self._doubtful(message, expected)
        for peer in self._peers(doubtful, message.micro_batch, *stages[::-1]):
            buffer = torch.empty(len(doubtful), dtype=torch.uint8, device=self._device)
            flags = Flags(self._transport.receive(buffer, peer, stages), buffer)
            for place, tensor in enumerate(doubtful):
                self._incoming[message][tensor.name].doubt(flags, place)

    def _receive(self, tensor: BoundaryTensor, message: Message) -> None:
        stages = message.source, message.target
        for piece in self._pieces(tensor, message.micro_batch, *stages[::-1]):
            buffer = self._empty(tensor, piece)
            pending = self._transport.receive(buffer, piece.peer, stages)
            self._incoming[message][tensor.name].add(pending, buffer)

    def _doubtful(
        self, message: Message, tensors: Sequence[BoundaryTensor]
    ) -> list[BoundaryTensor]:
        """Of a message's tensors those whose gradient, from the stage that sends it, may lack."""
        here = message.source if message.source in self._boundaries else message.target
        if not message.is_gradient or not self._boundaries[here].in_doubt:
            return []
        certain = self._boundaries[here].certain
        return [tensor for tensor in tensors if (tensor.name, message.source) not in certain]

    def _peers(
        self, tensors: Iterable[BoundaryTensor], micro_batch: int, here: int, there: int
    ) -> list[int]:
        """Who this rank exchanges pieces of tensors with."""
        pieces = [p for t in tensors for p in self._pieces(t, micro_batch, here, there)]
        return list(dict.fromkeys(piece.peer for piece in pieces))

    def _empty(self, tensor: BoundaryTensor, piece: Piece) -> torch.Tensor:
        shape = tensor.shape_for(self._layout.sized(piece.stop - piece.start))
        return torch.empty(shape, dtype=tensor.dtype, device=self._device)

    def _pieces(self, tensor: BoundaryTensor, m: int, here: int, there: int) -> list[Piece]:
        return self._layout.pieces(m, here, there, tensor.row_dim is not None)


def _wait(sends: _Sends) -> None:
    for pending, _ in sends:
        pending.wait()


def _rows_of(value: torch.Tensor, tensor: BoundaryTensor, piece: Piece) -> torch.Tensor:
    if tensor.row_dim is None:
        return value
    return value.narrow(tensor.row_dim, piece.start, piece.stop - piece.start)
