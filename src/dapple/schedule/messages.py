"""Who sends what to whom in which order, and when a receive may be posted: rules 3 to 5.

Between two positions and in one direction messages are first in, first out, also where stages of
both interleave. So a receiver posts in the order in which the other side sends, which the
schedule tells; a message whose buffers are not free yet holds up those behind it. Where that would
be a deadlock the stage in question gets room for more: `Room`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dapple.schedule.actions import Action, Schedule

RECEIVE_AHEAD = 1
"""Micro-batches whose activations are received beyond those in flight: rule 4."""
GRADIENT_WINDOW = 2
"""Micro-batches whose gradients are received at a time: rule 5."""


@dataclass(frozen=True)
class Room:
    """Micro-batches that each stage can receive ahead of their use.

    Attributes:
        inputs: per stage, activations of micro-batch m are received when all micro-batches up to
            m - inputs - 1 are freed: K_i, or more where messages would be stuck else.
        gradients: per stage, gradients of m when those up to m - gradients are returned: 2, or
            more.
    """

    inputs: tuple[int, ...]
    gradients: tuple[int, ...]

    @classmethod
    def of(cls, in_flight: Sequence[int]) -> Room:
        """The room that rules 4 and 5 begin with."""
        return cls(tuple(in_flight), (GRADIENT_WINDOW,) * len(in_flight))

    def widened(self, message: Message) -> Room:
        """Room for one micro-batch more of messages like this one."""
        inputs, gradients = list(self.inputs), list(self.gradients)
        (gradients if message.is_gradient else inputs)[message.target] += 1
        return Room(tuple(inputs), tuple(gradients))


class Link(NamedTuple):
    """Tensors from one stage to a later one; `returns`: gradients travel back."""

    producer: int
    consumer: int
    returns: bool = True


class Message(NamedTuple):
    """Activations of a micro-batch from one stage to another, or gradients the other way."""

    source: int
    target: int
    is_gradient: bool
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.source}{'B' if self.is_gradient else 'F'}{self.micro_batch}"


def chain(num_stages: int) -> tuple[Link, ...]:
    """Links of a model in which every stage hands tensors to the next one only."""
    return tuple(Link(s, s + 1) for s in range(num_stages - 1))


class Routes:
    """The messages that each action sends and needs.

    Args:
        schedule: the schedule.
        links: which stages exchange tensors.
    """

    def __init__(self, schedule: Schedule, links: Iterable[Link]) -> None:
        self._position_of = schedule.position_of
        self._num_positions = schedule.num_positions
        self._sends: dict[Action, list[Message]] = {}
        self._needs: dict[Action, list[Message]] = {}
        stages = range(schedule.num_stages)
        self._consumers: dict[int, list[Link]] = {s: [] for s in stages}
        self._producers: dict[int, list[Link]] = {s: [] for s in stages}
        for link in sorted(links):
            self._consumers[link.producer].append(link)
            self._producers[link.consumer].append(link)

    def sends(self, action: Action) -> list[Message]:
        """What an action sends, in order; to stages of its own position too."""
        found = self._sends.get(action)
        if found is None:
            found = self._sends[action] = self._find_sends(action)
        return found

    def needs(self, action: Action) -> list[Message]:
        """What an action waits for; from stages of its own position too."""
        found = self._needs.get(action)
        if found is None:
            found = self._needs[action] = self._find_needs(action)
        return found

    def _find_sends(self, action: Action) -> list[Message]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "F":
            return [Message(stage, x.consumer, False, micro_batch) for x in self._consumers[stage]]
        if action.returns:
            links = self._producers[stage]
            return [Message(stage, x.producer, True, micro_batch) for x in links if x.returns]
        return []

    def _find_needs(self, action: Action) -> list[Message]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "F":
            return [Message(x.producer, stage, False, micro_batch) for x in self._producers[stage]]
        if action.returns:
            links = self._consumers[stage]
            return [Message(x.consumer, stage, True, micro_batch) for x in links if x.returns]
        return []

    def is_local(self, message: Message) -> bool:
        """Both stages are at one position: the message is handed over in memory."""
        return self._position_of[message.source] == self._position_of[message.target]

    def between(self, row: Iterable[Action], receiver: int) -> list[Message]:
        """What a position with these actions sends to another one, in order."""
        return self.by_receiver(row)[receiver]

    def by_receiver(self, row: Iterable[Action]) -> list[list[Message]]:
        """What a position with these actions sends to each position, in order."""
        found: list[list[Message]] = [[] for _ in range(self._num_positions)]
        for action in row:
            here = self._position_of[action.stage]
            for message in self.sends(action):
                there = self._position_of[message.target]
                if there != here:
                    found[there].append(message)
        return found


class Progress:
    """How far the stages of one position are, and so which receives may be posted.

    Args:
        num_stages: stages of the schedule.
    """

    def __init__(self, num_stages: int) -> None:
        self.forwards = [0] * num_stages
        self.returned = [0] * num_stages
        self.freed = [0] * num_stages

    def count(self, action: Action) -> None:
        """An action has ended. Those of a kind come in the order of micro-batches."""
        if action.kind == "F":
            self.forwards[action.stage] += 1
        if action.returns:
            self.returned[action.stage] += 1
        if action.frees:
            self.freed[action.stage] += 1

    def allows(self, message: Message, room: Room) -> bool:
        """Whether the receive of a message may be posted."""
        stage, micro_batch = message.target, message.micro_batch
        if message.is_gradient:
            ready = self.forwards[stage] > micro_batch
            return ready and self.returned[stage] > micro_batch - room.gradients[stage]
        return self.freed[stage] >= micro_batch - room.inputs[stage] - RECEIVE_AHEAD + 1
