"""The engine for pipelines in which no two flows ever share a network card.

Then the length of every transfer is known beforehand, and each time is a maximum over earlier
ones plus a length: no event heap is needed. Units take turns, each running until it waits for
another one; sweeps go down and up the pipeline because forwards travel one way and backwards the
other.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapple.costs import PipelineCosts, Route
from dapple.simulator.trace import Message, Order, Trace, complete_at, deadlock


def run_static(costs: PipelineCosts, orders: Sequence[Order], windows: Sequence[int]) -> Trace:
    """Run one step with transfers that do not slow each other down.

    Args:
        costs: seconds and bytes.
        orders: per stage what it computes.
        windows: per stage K_i of rule 4.

    Raises:
        ScheduleError: the orders deadlock.
    """
    count = costs.num_units
    trace = Trace.of(costs)
    units = _connect(costs, orders, windows, trace)
    sweep = [units[number] for number in (*range(count), *range(count - 2, 0, -1))]
    waiting = count
    while waiting:
        before = waiting
        moved = False
        for unit in sweep:
            if unit.position < unit.length and unit.advance():
                moved = True
                waiting -= unit.position == unit.length
        if not moved and waiting == before:
            stuck = next(unit for unit in units if unit.position < unit.length)
            raise deadlock(costs, stuck.number, stuck.order[stuck.position])
    for part in costs.sums:
        start = complete_at(costs, part, trace.backward_end)
        if part.queued:
            start = max(start, trace.sums[-1][1])
        trace.sums.append((start, start + part.ring.seconds(part.size)))
    trace.finish(costs)
    return trace


class _Lane:
    """One direction of a channel, as its receiver sees it.

    Attributes:
        sent: ends of the sender's computations, by micro-batch; grows as the sender runs.
        seconds: of a transfer, per micro-batch size; None: nothing is sent.
        messages: what was transferred so far.
        free: when the last transfer ended; the next one starts no earlier (rule 3).
    """

    __slots__ = ("free", "messages", "seconds", "sent")

    def __init__(
        self, sent: list[float], seconds: tuple[float | None, ...], messages: list[Message]
    ) -> None:
        self.sent = sent
        self.seconds = seconds
        self.messages = messages
        self.free = 0.0


class _Unit:
    """One replica: its order, how far it is, and the lanes that feed it."""

    __slots__ = (
        "backward", "clock", "ended", "first_small", "forward", "gradients", "inputs",
        "last_size", "length", "number", "order", "position", "returned", "window",
    )  # fmt: skip

    def __init__(
        self, costs: PipelineCosts, number: int, order: Order, window: int, trace: Trace
    ) -> None:
        self.number = number
        self.order = order
        self.length = len(order)
        self.position = 0
        self.clock = 0.0
        self.window = window
        self.first_small = costs.first_small
        self.last_size = len(costs.sizes) - 1
        self.forward, self.backward = costs.forward[number], costs.backward[number]
        self.ended, self.returned = trace.forward_end[number], trace.backward_end[number]
        self.inputs: list[_Lane] = []
        self.gradients: list[_Lane] = []

    def advance(self) -> bool:
        """Run computations until one waits for another unit; False if none could run."""
        order, position, clock = self.order, self.position, self.clock
        ended, returned = self.ended, self.returned
        begun = position
        while position < self.length:
            action = order[position]
            posted = 0.0
            if action >= 0:
                micro_batch, lanes, lengths, done = action, self.inputs, self.forward, ended
                if lanes and micro_batch > self.window:
                    posted = returned[micro_batch - self.window - 1]  # rule 4
            else:
                micro_batch, lanes = ~action, self.gradients
                lengths, done = self.backward, returned
                if lanes:
                    posted = ended[micro_batch]  # rule 5
                    if micro_batch >= 2 and returned[micro_batch - 2] > posted:
                        posted = returned[micro_batch - 2]
            size = 0 if micro_batch < self.first_small else self.last_size
            if lanes:
                arrival = _receive(lanes, micro_batch, size, posted)
                if arrival is None:
                    break
                if arrival > clock:
                    clock = arrival
            clock += lengths[size]
            done.append(clock)
            position += 1
        self.position, self.clock = position, clock
        return position > begun


def _receive(lanes: list[_Lane], micro_batch: int, size: int, posted: float) -> float | None:
    """When the last message of a micro-batch has arrived; None if one is not sent yet."""
    for lane in lanes:
        if lane.seconds[size] is not None and len(lane.sent) <= micro_batch:
            return None
    last = 0.0
    for lane in lanes:
        seconds = lane.seconds[size]
        if seconds is None:
            continue
        start = lane.sent[micro_batch]
        if posted > start:
            start = posted
        if lane.free > start:
            start = lane.free
        lane.free = end = start + seconds
        lane.messages.append((micro_batch, start, end))
        if end > last:
            last = end
    return last


def _connect(
    costs: PipelineCosts, orders: Sequence[Order], windows: Sequence[int], trace: Trace
) -> list[_Unit]:
    units = [
        _Unit(costs, number, orders[stage], windows[stage], trace)
        for number, stage in enumerate(costs.stage_of)
    ]
    for number, channel in enumerate(costs.channels):
        source, target = units[channel.source], units[channel.target]
        there = _seconds(channel.forward_bytes, channel.route)
        back = _seconds(channel.backward_bytes, channel.back)
        target.inputs.append(_Lane(source.ended, there, trace.activations[number]))
        if any(seconds is not None for seconds in back):
            source.gradients.append(_Lane(target.returned, back, trace.gradients[number]))
    return units


def _seconds(sizes: tuple[float | None, ...], route: Route) -> tuple[float | None, ...]:
    return tuple(None if size is None else route.seconds(size) for size in sizes)
