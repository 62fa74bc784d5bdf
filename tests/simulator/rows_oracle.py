"""The oracle for any schedule: virtual stages, split backwards; from docs/semantics.md alone.

Posting a receive is a node of the dependency graph like computations and messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.simulator.oracle import Node, World, _alone, _sum_alone

Row = Sequence[tuple[int, str, int]]
"""Stage, kind and micro-batch of each computation of a position."""
Room = tuple[Sequence[int], Sequence[int]]
"""Per stage, micro-batches of activations beyond which one more is received, and of gradients."""


def rows_step_seconds(world: World, rows: Sequence[Row], room: Room) -> float:
    """Seconds of the step, by relaxation."""
    edges: dict[Node, list[Node]] = {}
    length: dict[Node, float] = {}
    for row in rows:
        for r in range(world.plan.stages[row[0][0]].replicas):
            previous: list[Node] = []
            for s, kind, m in row:
                node: Node = (kind, s, r, m)
                edges[node] = list(previous)
                length[node] = _seconds(world, kind, s, r, m)
                previous = [node]
    for sender in rows:
        for receiver in rows:
            if sender is not receiver:
                _add_queue(world, sender, receiver, room, edges, length)
    _add_rank_updates(world, rows, edges, length)
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


def _seconds(world: World, kind: str, s: int, r: int, m: int) -> float:
    whole = world.compute_seconds(kind if kind in "FB" else "B", s, r, m)
    return whole / 2 if kind in "IW" else whole


def _add_queue(
    world: World,
    sender: Row,
    receiver: Row,
    room: Room,
    edges: dict[Node, list[Node]],
    length: dict[Node, float],
) -> None:
    """All messages from one position to another, first in, first out between each two ranks."""
    own = {s for s, _, _ in receiver}
    replicas = range(world.plan.stages[receiver[0][0]].replicas)
    posted: dict[int, list[Node]] = {r: [] for r in replicas}
    moved: dict[tuple[int, int], list[Node]] = {}
    for s, kind, m in sender:
        for t in sorted(own) if kind != "W" else ():
            back = kind != "F"
            if (t < s) != back:
                continue
            pairs = list(_messages(world, s, t, m, back))
            for r in replicas:
                if not world.rows[t, r, m] or not _crosses(world, s, t, back):
                    continue
                post: Node = ("post", s, t, back, r, m)
                edges[post] = [*posted[r], *_posted_after(receiver, t, r, m, back, room)]
                length[post] = 0.0
                posted[r] = [post]
            for a, b, size in pairs:
                node: Node = ("message", s, t, back, a, b, m)
                line = moved.setdefault((a, b), [])
                edges[node] = [(kind, s, a, m), ("post", s, t, back, b, m), *line[-1:]]
                length[node] = _alone(world, size, world.link((s, a), (t, b)))
                line.append(node)
                used = next(k for u, k, n in receiver if (u, n) == (t, m) and (k != "F") == back)
                edges[used, t, b, m].append(node)


def _crosses(world: World, s: int, t: int, back: bool) -> bool:
    first, last = min(s, t), max(s, t)
    return any(
        world.holds(first, tensor.producer)
        and any(world.holds(last, layer) for layer in tensor.consumers)
        and (tensor.needs_grad or not back)
        for tensor in world.profile.tensors
    )


def _messages(world: World, s: int, t: int, m: int, back: bool) -> Iterator[tuple[int, int, float]]:
    for a in range(world.plan.stages[s].replicas):
        for b in range(world.plan.stages[t].replicas):
            pair = ((t, b), (s, a)) if back else ((s, a), (t, b))
            size = world.message_bytes(*pair, m, back)
            if size is not None:
                yield a, b, size


def _posted_after(row: Row, t: int, r: int, m: int, back: bool, room: Room) -> Iterator[Node]:
    """Computations after which a receive may be posted: rules 4 and 5."""
    inputs, gradients = room
    for s, kind, n in row:
        if s != t:
            continue
        if back and ((kind == "F" and n == m) or (kind in "BI" and n == m - gradients[t])):
            yield kind, t, r, n
        if not back and kind in "BW" and n == m - inputs[t] - 1:
            yield kind, t, r, n


def _add_rank_updates(
    world: World, rows: Sequence[Row], edges: dict[Node, list[Node]], length: dict[Node, float]
) -> None:
    """AllReduces of each stage, and one update per rank after all of its own."""
    last = world.total - 1
    final = {s: k for row in rows for s, k, m in row if m == last and k in "BW"}
    update: dict[tuple[int, int], Node] = {}
    for number, row in enumerate(rows):
        own = sorted({s for s, _, _ in row})
        for r in range(world.plan.stages[own[0]].replicas):
            node: Node = ("update", number, r)
            edges[node] = [(final[s], s, r, last) for s in own]
            length[node] = sum(world.optimizer_seconds(s, r) for s in own)
            update.update({(s, r): node for s in own})
    for number, (stages, size, layer, queued) in enumerate(world.sums()):
        members = world.members(stages)
        edges["sum", number] = [("sum", number - 1)] * queued
        for s, r in members:
            complete: Node = ("complete", number, s, r)
            edges[complete] = [(final[s], s, r, last)]
            whole = len(stages) == 1 and final[s] == "B"
            length[complete] = -world.lead(s, r, layer) if whole else 0.0
            edges["sum", number].append(complete)
            edges[update[s, r]].append(("sum", number))
        length["sum", number] = _sum_alone(world, members, size)
