"""The engine for any schedule: virtual stages, split backwards, a user's own order.

A rank runs the row of its position, which names stages; all messages between two ranks in one
direction are one queue (rules 3 to 5). Flows, cards and AllReduces are those of the event engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dapple.costs import Channel, PipelineCosts, Route
from dapple.schedule import Action, Message, Progress, Room, Routes, Schedule
from dapple.simulator.engine import Flows, shared_cards
from dapple.simulator.trace import Trace


def run_rows(costs: PipelineCosts, schedule: Schedule, room: Room) -> Trace:
    """Run one step.

    Args:
        costs: seconds and bytes.
        schedule: what each position computes; checked.
        room: how far ahead receives are posted, from `check_schedule`.
    """
    engine = _Engine(costs, schedule, room)
    engine.run_all()
    return engine.trace


@dataclass(slots=True)
class _Parcel:
    """A message between two units: what of its size travels, and where its times are noted."""

    message: Message
    sender: int
    receiver: int
    size: float
    times: list[tuple[int, float, float]]


class _Lane:
    """All that one rank sends to another, in order."""

    __slots__ = ("busy", "cards", "queue", "route", "start", "to")

    def __init__(self, route: Route, cards: tuple[tuple[int, int], ...], to: _Rank) -> None:
        self.route = route
        self.cards = cards
        self.to = to
        self.queue: deque[_Parcel] = deque()
        self.busy = False
        self.start = 0.0


class _Rank:
    """One device: its row, its units by stage, and what it has received.

    Attributes:
        missing: per message the parcels that have not arrived.
        posted: messages whose receives are posted.
        to_post: per sending position what is still to be posted.
        inward, outward: its lanes.
    """

    __slots__ = (
        "at", "busy", "inward", "missing", "outward", "posted", "progress", "row", "to_post",
        "units",
    )  # fmt: skip

    def __init__(self, row: tuple[Action, ...], units: dict[int, int], num_stages: int) -> None:
        self.row = row
        self.units = units
        self.at = 0
        self.busy = False
        self.progress = Progress(num_stages)
        self.missing: dict[Message, int] = {}
        self.posted: set[Message] = set()
        self.to_post: list[deque[Message]] = []
        self.inward: list[_Lane] = []
        self.outward: list[_Lane] = []


class _Engine(Flows):
    def __init__(self, costs: PipelineCosts, schedule: Schedule, room: Room) -> None:
        super().__init__(costs, Trace.of(costs))
        self.room = room
        self.routes = Routes(schedule, costs.links)
        self.sent: set[tuple[int, Message]] = set()
        self.ranks: list[_Rank] = []
        self.rank_of: dict[int, _Rank] = {}
        sent = [self.routes.by_receiver(row) for row in schedule.actions]
        for position, stages in enumerate(schedule.stages):
            for members in zip(*(costs.units_of[s] for s in stages), strict=True):
                units = dict(zip(stages, members, strict=True))
                rank = _Rank(schedule.actions[position], units, schedule.num_stages)
                self.ranks.append(rank)
                self.rank_of.update(dict.fromkeys(members, rank))
                self.find_receives(sent, position, rank)
        self.connect(schedule)

    def find_receives(self, sent: list[list[list[Message]]], position: int, rank: _Rank) -> None:
        unit = next(iter(rank.units.values()))
        for sender, messages in enumerate(sent):
            if sender != position:
                here = (m for m in messages[position] if self.rows(unit, m.micro_batch))
                rank.to_post.append(deque(here))

    def rows(self, unit: int, micro_batch: int) -> int:
        return self.costs.rows[unit][self.size_of(micro_batch)]

    def connect(self, schedule: Schedule) -> None:
        """Fill the lanes, in the order in which each rank sends."""
        by_stages: dict[tuple[int, int], list[tuple[int, Channel]]] = {}
        stage_of = self.costs.stage_of
        for number, channel in enumerate(self.costs.channels):
            pair = stage_of[channel.source], stage_of[channel.target]
            by_stages.setdefault(pair, []).append((number, channel))
        lanes: dict[tuple[int, int], _Lane] = {}
        for row in schedule.actions:
            for action in row:
                for message in self.routes.sends(action):
                    pair = message.source, message.target
                    if message.is_gradient:
                        pair = pair[::-1]
                    for number, channel in by_stages.get(pair, ()):
                        self.enqueue(message, number, channel, lanes)

    def enqueue(
        self,
        message: Message,
        number: int,
        channel: Channel,
        lanes: dict[tuple[int, int], _Lane],
    ) -> None:
        ends, route, sizes = (channel.source, channel.target), channel.route, channel.forward_bytes
        times = self.trace.activations[number]
        if message.is_gradient:
            ends, route, sizes = ends[::-1], channel.back, channel.backward_bytes
            times = self.trace.gradients[number]
        size = sizes[self.size_of(message.micro_batch)]
        if size is None:
            return
        sender, receiver = (self.rank_of[unit] for unit in ends)
        lane = lanes.get((id(sender), id(receiver)))
        if lane is None:
            lane = _Lane(route, shared_cards(route, self.costs.contended), receiver)
            lanes[id(sender), id(receiver)] = lane
            sender.outward.append(lane)
            receiver.inward.append(lane)
        lane.queue.append(_Parcel(message, ends[0], ends[1], size, times))
        receiver.missing[message] = receiver.missing.get(message, 0) + 1

    def run_all(self) -> None:
        for rank in self.ranks:
            self.post(0.0, rank)
        for rank in self.ranks:
            self.try_compute(0.0, rank)
        self.drain()
        assert all(rank.at == len(rank.row) for rank in self.ranks), "the schedule was checked"
        self.finish()

    # Computations: rules 1, 2 and 6.

    def seconds(self, unit: int, action: Action) -> float:
        size = self.size_of(action.micro_batch)
        if action.kind == "F":
            return self.costs.forward[unit][size]
        weights = self.costs.weights[unit][size]
        if action.kind == "W":
            return weights
        whole = self.costs.backward[unit][size]
        return whole if action.kind == "B" else whole - weights

    def try_compute(self, now: float, rank: _Rank) -> None:
        if rank.busy or rank.at == len(rank.row):
            return
        action = rank.row[rank.at]
        if any(rank.missing.get(message) for message in self.routes.needs(action)):
            return
        rank.busy = True
        unit = rank.units[action.stage]
        end = now + self.seconds(unit, action)
        self.at(end, self.ended, rank)
        if action.frees and action.micro_batch == self.costs.num_micro_batches - 1:
            self.last_backward(unit, end, action.kind == "B")

    def ended(self, now: float, rank: _Rank) -> None:
        action = rank.row[rank.at]
        unit = rank.units[action.stage]
        rank.busy = False
        rank.at += 1
        rank.progress.count(action)
        if action.kind == "F":
            self.trace.forward_end[unit].append(now)
        elif action.kind == "W":
            self.trace.weights_end[unit, action.micro_batch] = now
        else:
            self.trace.backward_end[unit].append(now)
        self.sent.update((unit, message) for message in self.routes.sends(action))
        for lane in rank.outward:
            self.try_send(now, lane)
        self.post(now, rank)
        self.try_compute(now, rank)

    # Transfers: rules 3, 4 and 5.

    def post(self, now: float, rank: _Rank) -> None:
        for queue in rank.to_post:
            while queue and rank.progress.allows(queue[0], self.room):
                rank.posted.add(queue.popleft())
        for lane in rank.inward:
            self.try_send(now, lane)

    def try_send(self, now: float, lane: _Lane) -> None:
        if lane.busy or not lane.queue:
            return
        parcel = lane.queue[0]
        if (parcel.sender, parcel.message) not in self.sent:
            return
        if parcel.message not in lane.to.posted:
            return
        lane.busy = True
        lane.start = now
        self.transfer(now, lane.route, lane.cards, parcel.size, lambda time: self.here(time, lane))

    def here(self, now: float, lane: _Lane) -> None:
        parcel = lane.queue.popleft()
        parcel.times.append((parcel.message.micro_batch, lane.start, now))
        lane.busy = False
        lane.to.missing[parcel.message] -= 1
        self.try_send(now, lane)
        self.try_compute(now, lane.to)
