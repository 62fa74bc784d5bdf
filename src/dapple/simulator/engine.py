"""What the event engines share: the heap, flows on shared cards, and AllReduces."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from dapple.costs import PipelineCosts, Route
from dapple.simulator.flows import Cards, Flow
from dapple.simulator.trace import Trace


class Flows:
    """Events in order of time, the flows among them, and the AllReduces of gradients."""

    def __init__(self, costs: PipelineCosts, trace: Trace) -> None:
        self.costs = costs
        self.trace = trace
        self.first_small, self.last_size = costs.first_small, len(costs.sizes) - 1
        self.cards = Cards(costs.contended)
        self.heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self.counter = 0
        # Per AllReduce the units whose last backward has not begun; one for a queue's predecessor.
        self.waiting = [
            sum(len(costs.units_of[stage]) for stage in part.stages) + part.queued
            for part in costs.sums
        ]
        self.sums_of = _sums_of_units(costs)
        self.flowing = [len(part.ring.between) for part in costs.sums]
        self.sums_start = [0.0] * len(costs.sums)
        self.sums_end = [0.0] * len(costs.sums)

    def at(self, time: float, action: Callable[[float, Any], None], what: Any) -> None:
        """Do something at a time."""
        self.counter += 1
        heapq.heappush(self.heap, (time, self.counter, action, what))

    def size_of(self, micro_batch: int) -> int:
        """Index into the sizes of micro-batches."""
        return 0 if micro_batch < self.first_small else self.last_size

    def drain(self) -> None:
        """Run all events."""
        heap = self.heap
        while heap:
            time, _, action, what = heapq.heappop(heap)
            action(time, what)

    def finish(self) -> None:
        """Note the AllReduces and the updates after them."""
        self.trace.sums = list(zip(self.sums_start, self.sums_end, strict=True))
        self.trace.finish(self.costs)

    def transfer(
        self,
        now: float,
        route: Route,
        cards: tuple[tuple[int, int], ...],
        size: float,
        done: Callable[[float], None],
    ) -> None:
        """Start a message."""
        if not cards or not size:
            self.at(now + route.seconds(size), lambda time, _: done(time), None)
        else:
            self.at(now + route.latency, self.flow_starts, Flow(cards, route.rate, size, done))

    # Flows that share cards.

    def flow_starts(self, now: float, flow: Flow) -> None:
        """Its latency is over."""
        self.predict(now, self.cards.join(flow, now))

    def flow_ends(self, now: float, prediction: tuple[Flow, int]) -> None:
        """The predicted end, unless its rate has changed since."""
        flow, version = prediction
        if flow.version == version:
            self.predict(now, self.cards.leave(flow, now))
            flow.done(now)

    def predict(self, now: float, flows: Iterable[Flow]) -> None:
        """Predict the ends of flows whose rates changed."""
        for flow in flows:
            flow.version += 1
            self.at(now + flow.left / flow.rate, self.flow_ends, (flow, flow.version))

    # AllReduces: rule 7.

    def last_backward(self, unit: int, end: float, leads: bool = True) -> None:
        """A unit's last backward has begun: its gradients are complete `lead` before its end.

        Without leads, at its end: the last half of a split one.
        """
        for number, lead in self.sums_of[unit]:
            self.sum_waits(number, end - lead if leads else end)

    def sum_waits(self, number: int, until: float) -> None:
        """One of the things that an AllReduce waits for is known to happen at `until`."""
        start = self.sums_start[number] = max(self.sums_start[number], until)
        self.waiting[number] -= 1
        if not self.waiting[number]:
            part = self.costs.sums[number]
            self.at(start + part.ring.inside_seconds(part.size), self.inside_done, number)

    def inside_done(self, now: float, number: int) -> None:
        """The rings inside the machines are done: start the one between them."""
        part = self.costs.sums[number]
        if not part.ring.between:
            self.sum_done(now, number)
        size = part.size * part.ring.between_factor
        for route in part.ring.between:
            cards = shared_cards(route, self.costs.contended)
            if cards:
                flow = Flow(cards, route.rate, size, lambda time: self.sum_flow_done(time, number))
                self.at(now + route.latency, self.flow_starts, flow)
            else:
                self.at(now + route.seconds(size), self.sum_flow_done, number)

    def sum_flow_done(self, now: float, number: int) -> None:
        """One flow of the ring between machines is done."""
        self.flowing[number] -= 1
        if not self.flowing[number]:
            self.sum_done(now, number)

    def sum_done(self, now: float, number: int) -> None:
        """An AllReduce is done; the next of its queue may start."""
        self.sums_end[number] = now
        following = number + 1
        if following < len(self.costs.sums) and self.costs.sums[following].queued:
            self.sum_waits(following, now)


def _sums_of_units(costs: PipelineCosts) -> list[list[tuple[int, float]]]:
    """Per unit the AllReduces that it takes part in, each with the unit's lead."""
    sums: list[list[tuple[int, float]]] = [[] for _ in costs.stage_of]
    for number, part in enumerate(costs.sums):
        units = [unit for stage in part.stages for unit in costs.units_of[stage]]
        for unit, lead in zip(units, part.leads or (0.0,) * len(units), strict=True):
            sums[unit].append((number, lead))
    return sums


def shared_cards(route: Route, contended: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The route's contended cards, each with the number of flows like this one."""
    ends = (route.out_card, route.out_count), (route.in_card, route.in_count)
    return tuple((card, count) for card, count in ends if card in contended)
