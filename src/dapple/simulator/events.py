"""The engine for flows that share network cards: an event heap and nothing else.

All state is in one object. An event is a time, a counter that keeps equal times in the order in
which they were found, what to do, and to whom. What can start is tried whenever something ended
that it may have waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapple.costs import PipelineCosts, Route
from dapple.simulator.engine import Flows, shared_cards
from dapple.simulator.flows import Flow
from dapple.simulator.trace import Message, Order, Trace, deadlock


def run_events(
    costs: PipelineCosts,
    orders: Sequence[Order],
    windows: Sequence[int],
    *,
    trace: Trace | None = None,
    since: float = 0.0,
) -> Trace:
    """Run one step, with the cards in `costs.contended` shared by the flows on them.

    Args:
        costs: seconds and bytes.
        orders: per stage what it computes.
        windows: per stage K_i of rule 4.
        trace: what happens when nothing is shared; it is true up to `since` and is simulated
            anew from there. None: start at 0.
        since: seconds from the step's start.

    Raises:
        ScheduleError: the orders deadlock.
    """
    engine = _Engine(costs, orders, windows, trace or Trace.of(costs))
    if trace is not None:
        engine.resume(since)
    engine.run(since)
    return engine.trace


class _Lane:
    """One direction of a channel: messages in the order of micro-batches, one at a time.

    Attributes:
        sender, receiver: the units.
        sizes: bytes per micro-batch size; None: nothing is sent.
        sent: ends of the sender's computations; message m exists once it is longer than m.
        messages: those that have arrived.
        gradients: the lane carries gradients.
        next: first micro-batch whose message has not arrived.
        busy, start: a transfer is under way, and since when.
    """

    __slots__ = (
        "busy", "cards", "gradients", "messages", "next", "receiver", "route", "sender", "sent",
        "sizes", "start",
    )  # fmt: skip

    def __init__(
        self,
        sender: _Unit,
        receiver: _Unit,
        route: Route,
        sizes: tuple[float | None, ...],
        messages: list[Message],
        gradients: bool,
        contended: Iterable[int],
    ) -> None:
        self.sender = sender
        self.receiver = receiver
        self.route = route
        self.sizes = sizes
        self.sent = sender.returned if gradients else sender.ended
        self.messages = messages
        self.gradients = gradients
        self.cards = shared_cards(route, contended)
        self.next = 0
        self.busy = False
        self.start = 0.0

    def posted(self) -> bool:
        """Whether the receiver has posted the receive of the next message: rules 4 and 5."""
        unit, micro_batch = self.receiver, self.next
        if self.gradients:
            return len(unit.ended) > micro_batch and len(unit.returned) >= micro_batch - 1
        return len(unit.returned) >= micro_batch - unit.window


class _Unit:
    """One replica: its order, how far it is, and the lanes that it waits for or feeds."""

    __slots__ = (
        "backward", "busy", "ended", "forward", "gradients_in", "gradients_out", "inputs",
        "number", "order", "outputs", "position", "returned", "stage", "window",
    )  # fmt: skip

    def __init__(
        self, costs: PipelineCosts, number: int, order: Order, window: int, trace: Trace
    ) -> None:
        self.number = number
        self.stage = costs.stage_of[number]
        self.order = order
        self.position = 0
        self.busy = False
        self.window = window
        self.forward, self.backward = costs.forward[number], costs.backward[number]
        self.ended, self.returned = trace.forward_end[number], trace.backward_end[number]
        self.inputs: list[_Lane] = []
        self.outputs: list[_Lane] = []
        self.gradients_in: list[_Lane] = []
        self.gradients_out: list[_Lane] = []


class _Engine(Flows):
    def __init__(
        self, costs: PipelineCosts, orders: Sequence[Order], windows: Sequence[int], trace: Trace
    ) -> None:
        super().__init__(costs, trace)
        self.total = costs.num_micro_batches
        self.units = [
            _Unit(costs, number, orders[stage], windows[stage], trace)
            for number, stage in enumerate(costs.stage_of)
        ]
        self.lanes: list[_Lane] = []
        self.connect()

    def connect(self) -> None:
        contended = self.costs.contended
        for number, channel in enumerate(self.costs.channels):
            source, target = self.units[channel.source], self.units[channel.target]
            lane = _Lane(
                source, target, channel.route, channel.forward_bytes,
                self.trace.activations[number], False, contended,
            )  # fmt: skip
            source.outputs.append(lane)
            target.inputs.append(lane)
            self.lanes.append(lane)
            if any(size is not None for size in channel.backward_bytes):
                lane = _Lane(
                    target, source, channel.back, channel.backward_bytes,
                    self.trace.gradients[number], True, contended,
                )  # fmt: skip
                target.gradients_out.append(lane)
                source.gradients_in.append(lane)
                self.lanes.append(lane)

    def run(self, now: float) -> None:
        for lane in self.lanes:
            self.try_send(now, lane)
        for unit in self.units:
            self.try_compute(now, unit)
        self.drain()
        for unit in self.units:
            if unit.position < len(unit.order):
                raise deadlock(self.costs, unit.number, unit.order[unit.position])
        self.finish()

    # Starting in the middle: forget what ends later, and take up what was under way.

    def resume(self, now: float) -> None:
        for unit in self.units:
            self.resume_unit(now, unit)
            if len(unit.returned) == self.total:
                self.last_backward(unit.number, unit.returned[-1])
        for lane in self.lanes:
            self.resume_lane(now, lane)

    def resume_unit(self, now: float, unit: _Unit) -> None:
        next_end = {True: now, False: now}
        for ends, forward in ((unit.ended, True), (unit.returned, False)):
            while ends and ends[-1] >= now:
                next_end[forward] = ends.pop()
        unit.position = len(unit.ended) + len(unit.returned)
        if unit.position == len(unit.order):
            return
        action = unit.order[unit.position]
        end = next_end[action >= 0]
        if end - self.seconds(unit, action) < now:
            unit.busy = True
            self.at(end, self.forward_ended if action >= 0 else self.backward_ended, unit)
            if action < 0 and len(unit.returned) == self.total - 1:
                self.last_backward(unit.number, end)

    def resume_lane(self, now: float, lane: _Lane) -> None:
        messages = lane.messages
        under_way = None
        while messages and messages[-1][2] >= now:
            message = messages.pop()
            under_way = message if message[1] < now else None
        lane.next = messages[-1][0] + 1 if messages else 0
        if under_way is None:
            return
        lane.next, lane.start, end = under_way
        lane.busy = True
        size = lane.sizes[self.size_of(lane.next)] or 0.0
        if not lane.cards or not size:
            self.at(end, self.arrived, lane)
            return
        joins = lane.start + lane.route.latency
        gone = lane.route.rate * max(0.0, now - joins)
        flow = self.flow(lane, max(0.0, size - gone))
        self.at(max(now, joins), self.flow_starts, flow)

    # Computations: rules 1, 2 and 6.

    def seconds(self, unit: _Unit, action: int) -> float:
        if action >= 0:
            return unit.forward[self.size_of(action)]
        return unit.backward[self.size_of(~action)]

    def try_compute(self, now: float, unit: _Unit) -> None:
        if unit.busy or unit.position == len(unit.order):
            return
        action = unit.order[unit.position]
        forward = action >= 0
        micro_batch = action if forward else ~action
        size = self.size_of(micro_batch)
        for lane in unit.inputs if forward else unit.gradients_in:
            if lane.next <= micro_batch and lane.sizes[size] is not None:
                return
        unit.busy = True
        if forward:
            self.at(now + unit.forward[size], self.forward_ended, unit)
        else:
            end = now + unit.backward[size]
            self.at(end, self.backward_ended, unit)
            if len(unit.returned) == self.total - 1:
                self.last_backward(unit.number, end)

    def forward_ended(self, now: float, unit: _Unit) -> None:
        unit.busy = False
        unit.position += 1
        unit.ended.append(now)
        for lane in unit.outputs:
            self.try_send(now, lane)
        for lane in unit.gradients_in:
            self.try_send(now, lane)
        self.try_compute(now, unit)

    def backward_ended(self, now: float, unit: _Unit) -> None:
        unit.busy = False
        unit.position += 1
        unit.returned.append(now)
        for lane in unit.gradients_out:
            self.try_send(now, lane)
        for lane in unit.inputs:
            self.try_send(now, lane)
        for lane in unit.gradients_in:
            self.try_send(now, lane)
        self.try_compute(now, unit)

    # Transfers: rules 3, 4 and 5.

    def try_send(self, now: float, lane: _Lane) -> None:
        if lane.busy:
            return
        while len(lane.sent) > lane.next and lane.posted():
            size = lane.sizes[self.size_of(lane.next)]
            if size is not None:
                break
            lane.next += 1
        else:
            return
        lane.busy = True
        lane.start = now
        if not lane.cards or not size:
            self.at(now + lane.route.seconds(size), self.arrived, lane)
        else:
            self.at(now + lane.route.latency, self.flow_starts, self.flow(lane, size))

    def flow(self, lane: _Lane, size: float) -> Flow:
        return Flow(lane.cards, lane.route.rate, size, lambda time: self.arrived(time, lane))

    def arrived(self, now: float, lane: _Lane) -> None:
        lane.messages.append((lane.next, lane.start, now))
        lane.busy = False
        lane.next += 1
        self.try_send(now, lane)
        self.try_compute(now, lane.receiver)
