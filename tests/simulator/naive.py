"""A naive simulator of shared cards, written from docs/semantics.md alone.

It steps from one instant to the next, tries everything that could start, and works out all rates
anew each time by raising them in small common steps. Slow, with nothing clever in it.
"""

from __future__ import annotations

from tests.simulator.oracle import World, posted_after

Rank = tuple[int, int]


class _Job:
    """Something under way: first `wait` seconds, then `left` bytes or nothing."""

    def __init__(self, name: tuple[object, ...], wait: float, left: float = 0.0) -> None:
        self.name = name
        self.wait = wait
        self.left = left
        self.cards: list[tuple[str, int]] = []
        self.cap = 0.0
        self.rate = 0.0

    def time_left(self) -> float:
        if self.wait > 0:
            return self.wait
        return self.left / self.rate if self.left > 0 else 0.0


def naive_step_seconds(world: World) -> float:
    """Seconds of the step of a plan under the "shared" network model."""
    done: set[tuple[object, ...]] = set()
    started: set[tuple[object, ...]] = set()
    jobs: list[_Job] = []
    now = 0.0
    while True:
        while _start_all(world, done, started, jobs):
            pass
        if not jobs:
            return now
        _set_rates(world, [job for job in jobs if job.wait <= 0 and job.left > 0])
        step = min(job.time_left() for job in jobs)
        now += step
        for job in jobs:
            ending = job.time_left() <= step * (1 + 1e-12)
            if job.wait > 0:
                job.wait = 0.0 if ending else job.wait - step
            else:
                job.left = 0.0 if ending else job.left - job.rate * step
        for job in [job for job in jobs if job.wait <= 0 and job.left <= 0]:
            jobs.remove(job)
            done.add(job.name)


def _start_all(world: World, done: set, started: set, jobs: list[_Job]) -> bool:
    before = len(started)
    for rank in world.ranks:
        _start_computation(world, rank, done, started, jobs)
    for a in world.ranks:
        for b in world.ranks:
            if a[0] < b[0]:
                _start_message(world, a, b, False, done, started, jobs)
                _start_message(world, a, b, True, done, started, jobs)
    _start_updates(world, done, started, jobs)
    return len(started) > before


def _launch(job: _Job, done: set, started: set, jobs: list[_Job]) -> None:
    started.add(job.name)
    if job.wait <= 0 and job.left <= 0:
        done.add(job.name)
    else:
        jobs.append(job)


def _start_computation(world: World, rank: Rank, done: set, started: set, jobs: list) -> None:
    for kind, m in world.order(rank[0]):
        name = (kind, *rank, m)
        if name in done:
            continue
        if name not in started and all(n in done for n in _awaited(world, kind, rank, m)):
            _launch(_Job(name, world.compute_seconds(kind, *rank, m)), done, started, jobs)
        return


def _awaited(world: World, kind: str, rank: Rank, m: int) -> list[tuple[object, ...]]:
    back = kind == "B"
    pairs = [(rank, other) if back else (other, rank) for other in world.ranks]
    return [
        ("message", back, a, b, m)
        for a, b in pairs
        if a[0] < b[0] and world.message_bytes(a, b, m, back) is not None
    ]


def _start_message(
    world: World, a: Rank, b: Rank, back: bool, done: set, started: set, jobs: list[_Job]
) -> None:
    sender, receiver = (b, a) if back else (a, b)
    for m in range(world.total):
        name = ("message", back, a, b, m)
        size = world.message_bytes(a, b, m, back)
        if size is None or name in done:
            continue
        needs = [("B" if back else "F", *sender, m), *posted_after(world, receiver, m, back)]
        if name not in started and all(need in done for need in needs):
            _launch(_flow(world, name, sender, receiver, size), done, started, jobs)
        return


def _flow(world: World, name: tuple[object, ...], a: Rank, b: Rank, size: float) -> _Job:
    link = world.link(a, b)
    if size == 0:
        return _Job(name, 0.0)
    if world.machine(*a) == world.machine(*b):
        return _Job(name, link.latency + size / link.bandwidth)
    job = _Job(name, link.latency, size)
    job.cards = [("out", world.machine(*a)), ("in", world.machine(*b))]
    job.cap = link.flow_bandwidth or link.bandwidth
    return job


def _start_updates(world: World, done: set, started: set, jobs: list[_Job]) -> None:
    group = world.plan.cluster.machines[0]
    inside, outside = group.inside, group.outside
    waits: dict[Rank, list[tuple[object, ...]]] = {
        rank: [("B", *rank, m) for m in range(world.total)] for rank in world.ranks
    }
    last: list[tuple[object, ...]] = []
    for number, (stages, size, layer, queued) in enumerate(world.sums()):
        members = world.members(stages)
        for rank in members:
            _start_completion(world, number, rank, layer * (len(stages) == 1), done, started, jobs)
        at = [world.machine(*rank) for rank in members]
        machines = list(dict.fromkeys(sorted(at)))
        most, count = max(map(at.count, at)), len(machines)
        first = ("inside", number)
        flows = [("between", number, machine) for machine in machines] if count > 1 else []
        for rank in members:
            waits[rank] += [first, *flows]
        if first not in started:
            needs = [("complete", number, *rank) for rank in members] + last * queued
            if all(need in done for need in needs):
                time = 2 * (most - 1) * inside.latency
                time += 2 * (most - 1) / most * size / inside.bandwidth
                _launch(_Job(first, time), done, started, jobs)
        elif first in done and flows and flows[0] not in started:
            for k, name in enumerate(flows):
                job = _Job(name, 2 * (count - 1) * outside.latency, 2 * (count - 1) / count * size)
                job.cards = [("out", machines[k]), ("in", machines[(k + 1) % count])]
                job.cap = outside.allreduce_bandwidth or outside.bandwidth
                _launch(job, done, started, jobs)
        last = [first, *flows]
    for rank, needs in waits.items():
        name = ("update", *rank)
        if name not in started and all(need in done for need in needs):
            _launch(_Job(name, world.optimizer_seconds(*rank)), done, started, jobs)


def _start_completion(
    world: World, number: int, rank: Rank, layer: int, done: set, started: set, jobs: list[_Job]
) -> None:
    """The last backward has begun: its gradients down to a layer take so much of it."""
    name = ("complete", number, *rank)
    if name not in started and ("B", *rank, world.total - 1) in started:
        whole = world.compute_seconds("B", *rank, world.total - 1)
        lead = world.lead(*rank, layer) if layer else 0.0
        _launch(_Job(name, whole - lead), done, started, jobs)


def _set_rates(world: World, flows: list[_Job]) -> None:
    """Raise all rates together; whoever meets a limit stays where it is."""
    outside = world.plan.cluster.machines[0].outside
    for flow in flows:
        flow.rate = 0.0
    rising = list(flows)
    while rising:
        steps = [flow.cap - flow.rate for flow in rising]
        cards = {card for flow in rising for card in flow.cards}
        room, users = {}, {}
        for card in cards:
            used = [flow for flow in flows if card in flow.cards]
            users[card] = sum(flow in rising for flow in used)
            room[card] = outside.bandwidth - sum(flow.rate for flow in used)
            steps.append(room[card] / users[card])
        step = min(steps)
        for flow in rising:
            flow.rate += step
        full = {card for card in cards if room[card] - step * users[card] <= 1e-12}
        rising = [
            flow
            for flow in rising
            if flow.cap - flow.rate > 1e-12 and not full.intersection(flow.cards)
        ]
