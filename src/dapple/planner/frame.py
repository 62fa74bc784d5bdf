"""Stages as neighbouring devices of one fixed order, whatever the layers and micro-batches.

    order      0 1 2 3 | 4 5 6 7        machine by machine: consecutive packing
               0 4 1 5 2 6 3 7          one of each machine in turn: the paper's Scatter First

A prefix of a plan is then described by two numbers: the layers that it covers and the position in
the order where the next stage begins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from dapple.cluster import Cluster
from dapple.planner.distinct import distinct
from dapple.planner.symmetry import Symmetry
from dapple.planner.tables import Ints
from dapple.planner.traffic import Devices

_OPTIONS = 24
"""Most replica counts that are looked at on large clusters."""
_MOST_STAGES = 1_000
"""Most pairs of a position and a replica count."""
_SCATTERED = 256
"""Most devices of a cluster where stages take one device of each machine in turn."""


@dataclass(frozen=True)
class Frame:
    """The stages that an order of devices allows. q positions, R replica counts.

    Attributes:
        order: all devices.
        positions: shape (q + 1,), indices into `order` where stages may begin or end.
        sources: per position, earlier ones from which the devices up to it may be left idle,
            because the next machine starts here.
        widths: shape (R,), replica counts in positions.
        kind: shape (q + 1, R): index into `stages` of a stage that starts there; -1: no room.
        stages: devices of one stage of each kind.
        link: shape (q + 1, R): index into `links` of the transfer into the stage.
        links: senders and receivers of one transfer of each kind. The stage before is taken to
            be as wide as the one behind.
        reduce_kind: shape (q + 1, R): index into `reduces`.
        reduces: the kind of stage whose backward may hide it, AllReduce seconds whatever the
            bytes, and for each byte.
    """

    order: Devices
    positions: Ints
    sources: tuple[tuple[int, ...], ...]
    widths: Ints
    kind: Ints
    stages: tuple[Devices, ...]
    link: Ints
    links: tuple[tuple[Devices, Devices], ...]
    reduce_kind: Ints
    reduces: tuple[tuple[int, float, float], ...]

    def devices(self, start: int, stop: int) -> Devices:
        """The devices between two positions, ascending."""
        return tuple(sorted(self.order[self.positions[start] : self.positions[stop]]))


def device_orders(cluster: Cluster) -> list[Devices]:
    """Machine by machine; the faster devices first, and last; one of each machine in turn.

    Of equally fast devices those with more memory are ahead, then those behind a faster network card.
    The last order is left out on large clusters, where it fills every network card.
    """
    kinds, machine = cluster.kind_of_device(), cluster.machine_of_device()
    plain = tuple(range(cluster.num_devices))
    rates = card_rates(cluster)
    worth = [(kinds[d].speed, kinds[d].memory, rates[machine[d]]) for d in plain]
    fastest = tuple(sorted(plain, key=lambda d: (*(-value for value in worth[d]), d)))
    slowest = tuple(sorted(plain, key=lambda d: (*worth[d], d)))
    first = {m: machine.index(m) for m in set(machine)}
    scattered = tuple(sorted(plain, key=lambda d: (d - first[machine[d]], machine[d])))
    orders = [plain, fastest, slowest]
    if cluster.num_devices <= _SCATTERED:
        orders.append(scattered)
    return list(dict.fromkeys(orders))


def card_rates(cluster: Cluster) -> list[float]:
    """Bytes a second of each machine's network card; infinite without one."""
    cards = [group.outside for group in cluster.machine_groups()]
    return [card.bandwidth if card else math.inf for card in cards]


def choose_step(devices: int, rows: int) -> int:
    """Multiples of how many devices stages take, so that the dynamic programme stays small.

    Args:
        devices: G.
        rows: of a micro-batch; more replicas than rows are of no use.
    """
    step = 1
    while True:
        positions = devices / step
        options = min(positions, rows / step + 1, 2 * math.sqrt(rows / step) + 1, _OPTIONS)
        if positions * options <= _MOST_STAGES:
            return step
        step *= 2


def make_frame(cluster: Cluster, symmetry: Symmetry, order: Devices, step: int) -> Frame:
    """Find the different stages, transfers and AllReduces of an order.

    Args:
        cluster: the devices.
        symmetry: which device sets cost the same.
        order: all devices, or the first of them.
        step: stages begin and end at multiples of so many devices.
    """
    positions = distinct([*range(0, len(order), step), len(order)])
    widths = _widths(len(positions) - 1)
    shape = len(positions), len(widths)
    kind, link, reduce = (np.full(shape, -1) for _ in range(3))
    stages: dict[Hashable, Devices] = {}
    links: dict[Hashable, tuple[Devices, Devices]] = {}
    reduces: dict[tuple[int, float, float], None] = {}
    index: dict[Hashable, int] = {}
    period = symmetry.period if order == tuple(range(len(order))) else 0
    alike: dict[Hashable, tuple[int, int, int]] = {}
    for start, (option, width) in itertools.product(range(shape[0] - 1), enumerate(widths)):
        if start + width >= shape[0]:
            continue
        begin, end = int(positions[start]), int(positions[start + width])
        first = max(0, 2 * begin - end)
        # Of equal machines, only the place within the machine matters.
        place = (begin % period, begin - first, end - begin) if period else (start, option)
        if place not in alike:
            devices, before = tuple(sorted(order[begin:end])), tuple(sorted(order[first:begin]))
            stage_key = symmetry.stage_key(devices)
            stages.setdefault(stage_key, devices)
            number = index.setdefault(("stage", stage_key), len(stages) - 1)
            cost = (number, *symmetry.reduce_cost(devices))
            reduces.setdefault(cost)
            link_key = symmetry.link_key(before, devices) if start else None
            if link_key:
                links.setdefault(link_key, (before, devices))
            alike[place] = (
                number,
                index.setdefault(("reduce", cost), len(reduces) - 1),
                index.setdefault(("link", link_key), len(links) - 1) if link_key else -1,
            )
        kind[start, option], reduce[start, option], link[start, option] = alike[place]
    return Frame(
        order=order,
        positions=positions,
        sources=_sources(cluster, order, positions),
        widths=widths,
        kind=kind,
        stages=tuple(stages.values()),
        link=link,
        links=tuple(links.values()),
        reduce_kind=reduce,
        reduces=tuple(reduces),
    )


def _widths(positions: int) -> Ints:
    """Replica counts in positions: all of them while they are few, else ever wider steps."""
    if positions <= _OPTIONS:
        return np.arange(1, positions + 1)
    grown = np.geomspace(1, positions, _OPTIONS).round().astype(int)
    return distinct([*grown, *(2**k for k in range(positions.bit_length()))])


def _sources(cluster: Cluster, order: Devices, positions: Ints) -> tuple[tuple[int, ...], ...]:
    machine = cluster.machine_of_device()
    sources: list[tuple[int, ...]] = []
    waiting: list[int] = []
    seen: set[int] = set()
    for here, index in enumerate(positions):
        begin = int(positions[here - 1]) if here else 0
        seen.update(machine[d] for d in order[begin:index])
        fresh = index == len(order) or machine[order[index]] not in seen
        sources.append(tuple(waiting) if fresh else ())
        waiting = [here] if fresh else [*waiting, here]
    return tuple(sources)
