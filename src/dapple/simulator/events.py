"""The engine for flows that share network cards: an event heap and nothing else.

All state is in one object. An event is a time, a counter that keeps equal times in the order in
which they were found, what to do, and to whom. What can start is tried whenever something ended
that it may have waited for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dapple.costs import PipelineCosts, Route
from dapple.simulator.flows import Cards, Flow
from dapple.simulator.trace import Order, Trace, Transfer, deadlock


def run_events(
    costs: PipelineCosts, orders: Sequence[Order], windows: Sequence[int], record: bool = False
) -> Trace:
    """Run one step, with the cards in `costs.contended` shared by the flows on them.

    Args:
        costs: seconds and bytes.
        orders: per stage what it computes.
        windows: per stage K_i of rule 4.
        record: keep every transfer.

    Raises:
        ScheduleError: the orders deadlock.
    """
    engine = _Engine(costs, orders, windows, record)
    engine.run()
    return engine.trace


class _Lane:
    """One direction of a channel: messages in the order of micro-batches, one at a time.

    Attributes:
        sender, receiver: the units.
        sizes: bytes per micro-batch size; None: nothing is sent.
        sent: ends of the sender's computations; message m exists once it is longer than m.
        gradients: the lane carries gradients.
        next: first micro-batch whose transfer has not started.
        arrived: micro-batches below this one have arrived or are not sent at all.
    """

    __slots__ = (
        "arrived", "busy", "cards", "gradients", "next", "receiver", "route", "sender", "sent",
        "sizes", "start",
    )  # fmt: skip

    def __init__(
        self,
        sender: _Unit,
        receiver: _Unit,
        route: Route,
        sizes: tuple[float | None, ...],
        gradients: bool,
        contended: Iterable[int],
    ) -> None:
        self.sender = sender
        self.receiver = receiver
        self.route = route
        self.sizes = sizes
        self.sent = sender.returned if gradients else sender.ended
        self.gradients = gradients
        self.cards = tuple(c for c in (route.out_card, route.in_card) if c in contended)
        self.next = 0
        self.arrived = 0
        self.busy = False
        self.start = 0.0


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


class _Engine:
    def __init__(
        self, costs: PipelineCosts, orders: Sequence[Order], windows: Sequence[int], record: bool
    ) -> None:
        count = costs.num_units
        self.costs = costs
        self.trace = Trace([[] for _ in range(count)], [[] for _ in range(count)])
        self.record = record
        self.cards = Cards(costs.contended)
        self.heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self.counter = 0
        self.units = [
            _Unit(costs, number, orders[stage], windows[stage], self.trace)
            for number, stage in enumerate(costs.stage_of)
        ]
        self._connect()
        # Per stage its units that still compute; per AllReduce its stages that still do.
        self.computing = [len(units) for units in costs.units_of]
        self.waiting = [len(part.stages) for part in costs.sums]
        self.flows_left = [len(part.ring.between) for part in costs.sums]
        self.sums_end = [0.0] * len(costs.sums)
        self.sums_start = [0.0] * len(costs.sums)

    def _connect(self) -> None:
        contended = self.costs.contended
        for channel in self.costs.channels:
            source, target = self.units[channel.source], self.units[channel.target]
            lane = _Lane(source, target, channel.route, channel.forward_bytes, False, contended)
            source.outputs.append(lane)
            target.inputs.append(lane)
            if any(size is not None for size in channel.backward_bytes):
                back = _Lane(target, source, channel.back, channel.backward_bytes, True, contended)
                target.gradients_out.append(back)
                source.gradients_in.append(back)

    def run(self) -> None:
        for unit in self.units:
            self.try_compute(0.0, unit)
        heap = self.heap
        while heap:
            time, _, action, what = heapq.heappop(heap)
            action(time, what)
        for unit in self.units:
            if unit.position < len(unit.order):
                raise deadlock(self.costs, unit.number, unit.order[unit.position])
        self.trace.sums = list(zip(self.sums_start, self.sums_end, strict=True))
        self.trace.finish(self.costs)

    def at(self, time: float, action: Callable[[float, Any], None], what: Any) -> None:
        self.counter += 1
        heapq.heappush(self.heap, (time, self.counter, action, what))

    # Computations: rules 1, 2 and 6.

    def try_compute(self, now: float, unit: _Unit) -> None:
        if unit.busy or unit.position == len(unit.order):
            return
        action = unit.order[unit.position]
        forward = action >= 0
        micro_batch = action if forward else ~action
        for lane in unit.inputs if forward else unit.gradients_in:
            if lane.arrived <= micro_batch and not self._silent(lane, micro_batch):
                return
        size = self.costs.size_of(micro_batch)
        unit.busy = True
        if forward:
            self.at(now + unit.forward[size], self.forward_ended, unit)
        else:
            self.at(now + unit.backward[size], self.backward_ended, unit)

    def _silent(self, lane: _Lane, micro_batch: int) -> bool:
        return lane.sizes[self.costs.size_of(micro_batch)] is None

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
        if len(unit.returned) == self.costs.num_micro_batches:
            self.stage_done(now, unit.stage)
        self.try_compute(now, unit)

    # Transfers: rules 3, 4 and 5.

    def try_send(self, now: float, lane: _Lane) -> None:
        if lane.busy:
            return
        total = self.costs.num_micro_batches
        while lane.next < total and self._silent(lane, lane.next):
            lane.next += 1
        if lane.next == total or len(lane.sent) <= lane.next or not self._posted(lane):
            return
        size = lane.sizes[self.costs.size_of(lane.next)]
        assert size is not None, "silent micro-batches were skipped"
        lane.busy = True
        lane.start = now
        if not lane.cards or not size:
            self.at(now + lane.route.seconds(size), self.arrived, lane)
        else:
            flow = Flow(lane.cards, lane.route.rate, size, lambda time: self.arrived(time, lane))
            self.at(now + lane.route.latency, self.flow_starts, flow)

    @staticmethod
    def _posted(lane: _Lane) -> bool:
        unit, micro_batch = lane.receiver, lane.next
        if lane.gradients:
            return len(unit.ended) > micro_batch and len(unit.returned) >= micro_batch - 1
        return len(unit.returned) >= micro_batch - unit.window

    def arrived(self, now: float, lane: _Lane) -> None:
        if self.record:
            ends = lane.sender.number, lane.receiver.number
            self.trace.transfers.append(Transfer(*ends, lane.next, lane.start, now))
        lane.busy = False
        lane.next += 1
        lane.arrived = lane.next
        self.try_send(now, lane)
        self.try_compute(now, lane.receiver)

    # Flows that share cards.

    def flow_starts(self, now: float, flow: Flow) -> None:
        self._predict(now, self.cards.join(flow, now))

    def flow_ends(self, now: float, prediction: tuple[Flow, int]) -> None:
        flow, version = prediction
        if flow.version == version:
            self._predict(now, self.cards.leave(flow, now))
            flow.done(now)

    def _predict(self, now: float, flows: Iterable[Flow]) -> None:
        for flow in flows:
            flow.version += 1
            self.at(now + flow.left / flow.rate, self.flow_ends, (flow, flow.version))

    # AllReduces: rule 7.

    def stage_done(self, now: float, stage: int) -> None:
        self.computing[stage] -= 1
        if self.computing[stage]:
            return
        for number, part in enumerate(self.costs.sums):
            if stage in part.stages:
                self.waiting[number] -= 1
                if not self.waiting[number]:
                    self.sums_start[number] = now
                    self.at(now + part.ring.inside_seconds(part.size), self.inside_done, number)

    def inside_done(self, now: float, number: int) -> None:
        part = self.costs.sums[number]
        self.sums_end[number] = now
        size = part.size * part.ring.between_factor
        for route in part.ring.between:
            cards = tuple(
                card for card in (route.out_card, route.in_card) if card in self.costs.contended
            )
            if cards:
                flow = Flow(cards, route.rate, size, lambda time: self.sum_flow_done(time, number))
                self.at(now + route.latency, self.flow_starts, flow)
            else:
                self.at(now + route.seconds(size), self.sum_flow_done, number)

    def sum_flow_done(self, now: float, number: int) -> None:
        self.sums_end[number] = max(self.sums_end[number], now)
