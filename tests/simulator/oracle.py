"""A second simulator, written from docs/semantics.md alone, for pipelines that share no card.

It shares no code with the first one: rows are sets, times are found by relaxing a dependency
graph until nothing changes, and there is neither an order of evaluation nor an event.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from dapple.cluster import Link
from dapple.records import ModelProfile, Plan

Node = tuple[object, ...]

BUCKET_BYTES, MOST_BUCKETS = 6, 3
"""Small ones, so that small models have several; see the fixture of the same name."""


class World:
    """A plan taken apart: who holds which rows, how long what takes, who sends what to whom."""

    def __init__(self, plan: Plan, profile: ModelProfile) -> None:
        self.plan, self.profile = plan, profile
        self.total = plan.num_micro_batches
        self.stages = range(plan.num_stages)
        self.window = [
            self.total if plan.schedule == "gpipe" else min(stage.warmup, self.total)
            for stage in plan.stages
        ]
        self.ranks = [(s, r) for s in self.stages for r in range(plan.stages[s].replicas)]
        micro_batches = _cut(range(plan.global_batch_size), self.total)
        self.rows = {
            (s, r, m): set(_cut(micro_batches[m], plan.stages[s].replicas)[r])
            for s, r in self.ranks
            for m in range(self.total)
        }
        # Asked again and again while an oracle looks for what can start.
        for name in ("compute_seconds", "message_bytes", "order", "machine", "link"):
            setattr(self, name, functools.cache(getattr(self, name)))

    def device(self, s: int, r: int) -> int:
        return self.plan.stages[s].devices[r]

    def machine(self, s: int, r: int) -> int:
        return self.plan.cluster.machine_of_device()[self.device(s, r)]

    def compute_seconds(self, kind: str, s: int, r: int, m: int) -> float:
        stage = self.plan.stages[s]
        layers = self.profile.layers[stage.start : stage.stop]
        field = "forward_seconds" if kind == "F" else "backward_seconds"
        speed = self.plan.cluster.kind_of_device()[self.device(s, r)].speed
        return sum(getattr(layer, field)[0] for layer in layers) * len(self.rows[s, r, m]) / speed

    def message_bytes(
        self, a: tuple[int, int], b: tuple[int, int], m: int, back: bool
    ) -> float | None:
        """Bytes from rank a of an earlier stage to rank b; None if there is no message."""
        shared = len(self.rows[*a, m] & self.rows[*b, m])
        tensors = [
            tensor
            for tensor in self.profile.tensors
            if self.holds(a[0], tensor.producer)
            and any(self.holds(b[0], layer) for layer in tensor.consumers)
            and (tensor.needs_grad or not back)
        ]
        if not shared or not tensors:
            return None
        return sum(t.bytes_per_sample * shared + t.fixed_bytes for t in tensors)

    def holds(self, s: int, layer: int) -> bool:
        return self.plan.stages[s].start <= layer < self.plan.stages[s].stop

    def link(self, a: tuple[int, int], b: tuple[int, int]) -> Link:
        group = self.plan.cluster.machines[0]
        link = group.inside if self.machine(*a) == self.machine(*b) else group.outside
        assert link is not None
        return link

    def order(self, s: int) -> list[tuple[str, int]]:
        """Computations of a stage, from the words of the schedules."""
        total = self.total
        if self.plan.schedule == "gpipe":
            return [("F", m) for m in range(total)] + [("B", m) for m in range(total)]
        ahead = self.window[s]
        rows = [("F", m) for m in range(ahead)]
        for m in range(total):
            rows.append(("B", m))
            if m + ahead < total:
                rows.append(("F", m + ahead))
        return rows

    def sums(self) -> Iterator[tuple[list[int], int, int, bool]]:
        """Stages and bytes of each AllReduce, its lowest layer, and whether it queues (rule 7)."""
        for own in self.plan.positions:
            queued = False
            for s in reversed(own) if self.plan.stages[own[0]].replicas > 1 else ():
                for stages, size, layer in self.buckets(s):
                    yield stages, size, layer, queued
                    queued = True
        for group in self.profile.tied:
            holders = [s for s in self.stages if any(self.holds(s, m.layer) for m in group.members)]
            if len(holders) > 1:
                yield holders, group.parameter_bytes, 0, False

    def buckets(self, s: int) -> Iterator[tuple[list[int], int, int]]:
        own = {
            n: layer.parameter_bytes
            for n, layer in enumerate(self.profile.layers)
            if self.holds(s, n)
        }
        for group in self.profile.tied:
            layers = sorted({m.layer for m in group.members})
            alone = all(self.holds(s, layer) for layer in layers)
            for layer in layers:
                if layer in own and not (alone and layer == layers[0]):
                    own[layer] -= group.parameter_bytes
        full = max(BUCKET_BYTES, sum(own.values()) / MOST_BUCKETS)
        waiting: list[int] = []
        for layer in sorted(own, reverse=True):
            if own[layer] > 0:
                waiting.append(layer)
            size = sum(own[n] for n in waiting)
            if waiting and (size >= full or not any(own[n] > 0 for n in own if n < layer)):
                yield [s], size, waiting[-1]
                waiting = []

    def lead(self, s: int, r: int, layer: int) -> float:
        """Seconds from a layer's last backward to the end of its stage's on a replica."""
        later = self.profile.layers[self.plan.stages[s].start : layer]
        speed = self.plan.cluster.kind_of_device()[self.device(s, r)].speed
        rows = len(self.rows[s, r, self.total - 1])
        return sum(n.backward_seconds[0] for n in later) * rows / speed

    def members(self, stages: list[int]) -> list[tuple[int, int]]:
        return [rank for rank in self.ranks if rank[0] in stages]

    def optimizer_seconds(self, s: int, r: int) -> float:
        stage = self.plan.stages[s]
        speed = self.plan.cluster.kind_of_device()[self.device(s, r)].speed
        layers = self.profile.layers[stage.start : stage.stop]
        return sum(layer.optimizer_seconds for layer in layers) / speed


def _cut(rows: range, parts: int) -> list[range]:
    """tensor_split, one row at a time."""
    sizes = [0] * parts
    for n in range(len(rows)):
        sizes[n % parts] += 1
    starts = [sum(sizes[:k]) for k in range(parts)]
    return [rows[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def oracle_step_seconds(world: World) -> float:
    """Seconds of the step: the longest path, found by relaxation."""
    edges: dict[Node, list[Node]] = {}
    length: dict[Node, float] = {}
    for s, r in world.ranks:
        _add_computations(world, s, r, edges, length)
    for a in world.ranks:
        for b in world.ranks:
            if a[0] < b[0]:
                _add_lane(world, a, b, False, edges, length)
                _add_lane(world, a, b, True, edges, length)
    _add_updates(world, edges, length)
    end = dict.fromkeys(length, 0.0)
    changed = True
    while changed:
        changed = False
        for node, before in edges.items():
            time = max((end[n] for n in before), default=0.0) + length[node]
            if time > end[node]:
                end[node] = time
                changed = True
    return max(end.values())


def _add_computations(
    world: World, s: int, r: int, edges: dict[Node, list[Node]], length: dict[Node, float]
) -> None:
    previous: list[Node] = []
    for kind, m in world.order(s):
        node: Node = (kind, s, r, m)
        edges[node] = previous[-1:]
        length[node] = world.compute_seconds(kind, s, r, m)
        previous.append(node)


def _add_lane(
    world: World,
    a: tuple[int, int],
    b: tuple[int, int],
    back: bool,
    edges: dict[Node, list[Node]],
    length: dict[Node, float],
) -> None:
    previous: list[Node] = []
    sender, receiver = (b, a) if back else (a, b)
    kind = "B" if back else "F"
    for m in range(world.total):
        size = world.message_bytes(a, b, m, back)
        if size is None:
            continue
        node: Node = ("message", kind, a, b, m)
        edges[node] = [(kind, *sender, m), *posted_after(world, receiver, m, back), *previous[-1:]]
        length[node] = _alone(world, size, world.link(a, b))
        edges[kind, *receiver, m].append(node)
        previous.append(node)


def posted_after(world: World, receiver: tuple[int, int], m: int, back: bool) -> list[Node]:
    """Computations after which the receive of message m is posted (rules 4 and 5)."""
    if back:
        return [("F", *receiver, m)] + ([("B", *receiver, m - 2)] if m >= 2 else [])
    window = world.window[receiver[0]]
    return [] if m < window + 1 else [("B", *receiver, m - window - 1)]


def _alone(world: World, size: float, link: Link) -> float:
    if size == 0:
        return 0.0
    rate = link.flow_bandwidth or link.bandwidth
    return size / rate + (0.0 if world.plan.network_model == "paper" else link.latency)


def _add_updates(world: World, edges: dict[Node, list[Node]], length: dict[Node, float]) -> None:
    for s, r in world.ranks:
        edges["update", s, r] = [("B", s, r, m) for m in range(world.total)]
        length["update", s, r] = world.optimizer_seconds(s, r)
    for number, (stages, size, layer, queued) in enumerate(world.sums()):
        members = world.members(stages)
        edges["sum", number] = [("sum", number - 1)] * queued
        for rank in members:
            # The gradients are there before the backward's end: a step back in time.
            complete = ("complete", number, *rank)
            edges[complete] = [("B", *rank, m) for m in range(world.total)]
            length[complete] = -world.lead(*rank, layer) if len(stages) == 1 else 0.0
            edges["sum", number].append(complete)
        length["sum", number] = _sum_alone(world, members, size)
        for rank in members:
            edges["update", *rank].append(("sum", number))


def _sum_alone(world: World, members: list[tuple[int, int]], size: int) -> float:
    group = world.plan.cluster.machines[0]
    inside, outside = group.inside, group.outside
    assert outside is not None
    machines = [world.machine(*rank) for rank in members]
    most, count, ranks = max(map(machines.count, machines)), len(set(machines)), len(machines)
    inside_rate = inside.allreduce_bandwidth or inside.bandwidth
    outside_rate = outside.allreduce_bandwidth or outside.bandwidth
    if world.plan.network_model == "paper":
        rates = [inside_rate] * (most > 1) + [outside_rate] * (count > 1)
        return 2 * (ranks - 1) / ranks * size / min(rates)
    time = 2 * (most - 1) * inside.latency + 2 * (most - 1) / most * size / inside_rate
    if count > 1:
        time += 2 * (count - 1) * outside.latency + 2 * (count - 1) / count * size / outside_rate
    return time
