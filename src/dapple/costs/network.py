"""What a transfer and an AllReduce cost: docs/semantics.md, section "Network models"."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from dapple.cluster import NETWORK_MODELS, Cluster, Link
from dapple.errors import InputError

NO_CARD = -1


class Route(NamedTuple):
    """The way from one device to another.

    Attributes:
        latency: seconds before the first byte.
        rate: bytes per second of a flow that is alone.
        out_card, in_card: network cards that the flow shares with others; NO_CARD for none.
            Machine m has the cards 2 m (out of it) and 2 m + 1 (into it).
        out_count, in_count: flows like this one on each card, itself among them; more than one
            only where equal replicas were merged (`merge_equal_replicas`).
    """

    latency: float
    rate: float
    out_card: int = NO_CARD
    in_card: int = NO_CARD
    out_count: int = 1
    in_count: int = 1

    def seconds(self, size: float) -> float:
        """Seconds of a transfer of `size` bytes that shares nothing; none for no bytes."""
        return self.latency + size / self.rate if size > 0 else 0.0


class Ring(NamedTuple):
    """An AllReduce over some devices: rings inside machines first, then one between machines.

    Attributes:
        inside_latency: seconds of the part inside machines that do not depend on the bytes.
        inside_seconds_per_byte: seconds of that part for each byte of gradients.
        between: one route per machine to the next; empty inside one machine, and in the paper
            model, which shares nothing.
        between_factor: bytes on each of these routes for each byte of gradients, 2 (k-1)/k.
    """

    inside_latency: float
    inside_seconds_per_byte: float
    between: tuple[Route, ...] = ()
    between_factor: float = 0.0

    def inside_seconds(self, size: float) -> float:
        """Seconds before the flows between machines start."""
        return self.inside_latency + size * self.inside_seconds_per_byte if size > 0 else 0.0

    def seconds(self, size: float) -> float:
        """Seconds of an AllReduce of `size` bytes that shares no card with anything else."""
        flows = [route.seconds(size * self.between_factor) for route in self.between]
        return self.inside_seconds(size) + max(flows, default=0.0)


class Network:
    """Routes and rings of a cluster under one network model.

    Args:
        cluster: the cluster.
        model: "shared" or "paper".
    """

    def __init__(self, cluster: Cluster, model: str) -> None:
        if model not in NETWORK_MODELS:
            known = ", ".join(NETWORK_MODELS)
            raise InputError(f'network model "{model}" is unknown; known: {known}')
        self.cluster = cluster
        self.model = model
        self._machine_of = cluster.machine_of_device()
        self._groups = cluster.machine_groups()
        self._routes: dict[tuple[int, int], Route] = {}
        self._rings: dict[tuple[int, ...], Ring] = {}

    def machine(self, device: int) -> int:
        """Machine number of a device."""
        return self._machine_of[device]

    def card_bandwidth(self, card: int) -> float:
        """Bytes per second of a network card in its direction."""
        return self._outside(card // 2).bandwidth

    def route(self, source: int, target: int) -> Route:
        """The route between two different devices."""
        ends = self._machine_of[source], self._machine_of[target]
        found = self._routes.get(ends)
        if found is None:
            found = self._routes[ends] = self._find_route(*ends)
        return found

    @cached_property
    def best_route(self) -> tuple[float, float]:
        """The least latency and the highest rate among all pairs of devices."""
        sizes = self.cluster.machine_sizes()
        first = list(itertools.accumulate(sizes, initial=0))
        routes = [self.route(first[m], first[m] + 1) for m, size in enumerate(sizes) if size > 1]
        cards = [group.outside for group in self._groups]
        outside = [(m, card) for m, card in enumerate(cards) if card is not None and len(sizes) > 1]
        # The worse of two cards counts: the two fastest give the highest rate, and likewise latency.
        for worst in (lambda card: -flow_rate(card), lambda card: card.latency):
            pair = sorted(outside, key=lambda end: worst(end[1]))[:2]
            if len(pair) == 2:
                routes.append(self.route(first[pair[0][0]], first[pair[1][0]]))
        if not routes:
            return 0.0, math.inf
        return min(route.latency for route in routes), max(route.rate for route in routes)

    def ring(self, devices: Sequence[int]) -> Ring:
        """The AllReduce over `devices`."""
        key = tuple(devices)
        found = self._rings.get(key)
        if found is None:
            found = self._paper_ring(key) if self.model == "paper" else self._shared_ring(key)
            self._rings[key] = found
        return found

    def _find_route(self, source: int, target: int) -> Route:
        if source == target:
            link = self._groups[source].inside
            latency, rate = link.latency, flow_rate(link)
        else:
            ends = self._outside(source), self._outside(target)
            latency = max(link.latency for link in ends)
            rate = min(map(flow_rate, ends))
        if self.model == "paper":
            return Route(0.0, rate)
        if source == target:
            return Route(latency, rate)
        return Route(latency, rate, 2 * source, 2 * target + 1)

    def _paper_ring(self, devices: tuple[int, ...]) -> Ring:
        count = len(devices)
        if count == 1:
            return Ring(0.0, 0.0)
        members = self._members(devices)
        links = [self._groups[m].inside for m, size in members.items() if size > 1]
        if len(members) > 1:
            links += [self._outside(machine) for machine in members]
        return Ring(0.0, 2 * (count - 1) / count / min(map(_ring_rate, links)))

    def _shared_ring(self, devices: tuple[int, ...]) -> Ring:
        members = self._members(devices)
        latency = per_byte = 0.0
        for machine, size in members.items():
            link = self._groups[machine].inside
            latency = max(latency, 2 * (size - 1) * link.latency)
            per_byte = max(per_byte, 2 * (size - 1) / size / _ring_rate(link))
        count = len(members)
        if count == 1:
            return Ring(latency, per_byte)
        machines = list(members)
        links = [self._outside(machine) for machine in machines]
        # Every step of a ring waits for its slowest link.
        step_latency = 2 * (count - 1) * max(link.latency for link in links)
        rate = min(min(_ring_rate(link), link.bandwidth) for link in links)
        between = tuple(
            Route(step_latency, rate, 2 * here, 2 * there + 1)
            for here, there in zip(machines, machines[1:] + machines[:1], strict=True)
        )
        return Ring(latency, per_byte, between, 2 * (count - 1) / count)

    def _members(self, devices: tuple[int, ...]) -> dict[int, int]:
        members: dict[int, int] = {}
        for device in devices:
            machine = self._machine_of[device]
            members[machine] = members.get(machine, 0) + 1
        return members

    def _outside(self, machine: int) -> Link:
        link = self._groups[machine].outside
        assert link is not None, "clusters of several machines have cards; one machine needs none"
        return link


def flow_rate(link: Link) -> float:
    """Bytes per second of a flow that is alone."""
    return min(link.bandwidth, link.flow_bandwidth or link.bandwidth)


def _ring_rate(link: Link) -> float:
    return link.allreduce_bandwidth or link.bandwidth
