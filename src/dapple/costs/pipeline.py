"""A plan's stages with every cost filled in: what the simulator runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dapple.costs.model import CostModel, Crossing
from dapple.costs.network import NO_CARD, Network, Ring, Route
from dapple.costs.rows import overlaps, split_rows
from dapple.costs.shards import update_seconds
from dapple.errors import PlanError
from dapple.records import StagePlan
from dapple.schedule import Link


class Channel(NamedTuple):
    """Messages between two units: activations one way, gradients the other.

    Attributes:
        source, target: units (see PipelineCosts); source belongs to the earlier stage.
        route, back: the way of the activations, and of the gradients.
        forward_bytes, backward_bytes: per micro-batch size; None: nothing is sent.
    """

    source: int
    target: int
    route: Route
    back: Route
    forward_bytes: tuple[float | None, ...]
    backward_bytes: tuple[float | None, ...]


class GradientSum(NamedTuple):
    """One AllReduce: a bucket of a stage's gradients, or a tied parameter of several stages.

    Attributes:
        stages: its stages; it starts when its gradients are there on all their replicas.
        size: bytes of gradients.
        ring: what it costs.
        leads: per unit of these stages, in order, the seconds of its last backward that are left
            when the gradients are there; empty: none, the last backward has ended.
        queued: it starts no earlier than the end of the one before it in `sums` (rule 7).
    """

    stages: tuple[int, ...]
    size: int
    ring: Ring
    leads: tuple[float, ...] = ()
    queued: bool = False


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Costs of every replica and message. A unit is a replica of a stage, counted through.

    There are at most two micro-batch sizes: micro-batches below `first_small` have `sizes[0]`
    rows, the others `sizes[-1]`. Seconds per unit have one entry per size.

    Attributes:
        num_micro_batches: M.
        sizes: rows per micro-batch size.
        first_small: number of the first micro-batch of the last size; M if there is one size.
        stage_of, replica_of, device_of: per unit.
        units_of: per stage its units.
        warmup: K_i per stage, at most M.
        rows: per unit its rows.
        forward, backward: per unit its seconds; backward includes recompute.
        recompute: per unit the seconds of backward that run forwards again.
        weights: per unit the seconds of backward that compute gradients of weights.
        links: which stages exchange tensors.
        channels: who sends what to whom.
        sums: the AllReduces.
        optimizer: per unit the seconds of its update.
        contended: bytes per second of the network cards that the flows could fill; no flow can
            slow another one down on any other card.
        crowded: messages alone could fill one of these cards, without any AllReduce.
    """

    num_micro_batches: int
    sizes: tuple[int, ...]
    first_small: int
    stage_of: tuple[int, ...]
    replica_of: tuple[int, ...]
    device_of: tuple[int, ...]
    units_of: tuple[tuple[int, ...], ...]
    warmup: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    recompute: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    links: tuple[Link, ...]
    channels: tuple[Channel, ...]
    sums: tuple[GradientSum, ...]
    optimizer: tuple[float, ...]
    contended: dict[int, float]
    crowded: bool

    @property
    def num_units(self) -> int:
        """Number of replicas of all stages together; the world size."""
        return len(self.stage_of)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.units_of)

    @property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """The stages that share devices, in the order of their first ones."""
        found: dict[tuple[int, ...], list[int]] = {}
        for stage, units in enumerate(self.units_of):
            found.setdefault(tuple(self.device_of[u] for u in units), []).append(stage)
        return tuple(map(tuple, found.values()))

    def size_of(self, micro_batch: int) -> int:
        """Index into `sizes` of a micro-batch."""
        return 0 if micro_batch < self.first_small else len(self.sizes) - 1


def pipeline_costs(
    model: CostModel,
    stages: Sequence[StagePlan],
    global_batch_size: int,
    num_micro_batches: int,
) -> PipelineCosts:
    """Fill in the costs of a plan's stages.

    Args:
        model: costs of layers and links.
        stages: adjacent stages that cover the profile's layers.
        global_batch_size: rows of a step.
        num_micro_batches: M.

    Raises:
        PlanError: the stages do not fit the profile or the cluster.
    """
    _check_fit(model, stages)
    base, extra = divmod(global_batch_size, num_micro_batches)
    sizes = (base + 1, base) if extra else (base,)
    splits = [[split_rows(n, s.replicas, s.rows) for n in sizes] for s in stages]
    units = [(s, r) for s, stage in enumerate(stages) for r in range(stage.replicas)]
    first = list(itertools.accumulate((stage.replicas for stage in stages), initial=0))
    forward, backward, again = _unit_seconds(model, stages, splits)
    device_of = tuple(device for stage in stages for device in stage.devices)
    channels = _channels(model, stages, splits, first)
    sums = _gradient_sums(model, stages, splits)
    messages = [route for channel in channels for route in _routes_in_use(channel)]
    rings = [route for part in sums for route in part.ring.between]
    return PipelineCosts(
        num_micro_batches=num_micro_batches,
        sizes=sizes,
        first_small=extra or num_micro_batches,
        stage_of=tuple(s for s, _ in units),
        replica_of=tuple(r for _, r in units),
        device_of=device_of,
        units_of=tuple(tuple(range(a, b)) for a, b in itertools.pairwise(first)),
        warmup=tuple(min(stage.warmup, num_micro_batches) for stage in stages),
        rows=tuple(tuple(split[r] for split in splits[s]) for s, r in units),
        forward=forward,
        backward=backward,
        recompute=again,
        weights=tuple(
            tuple(
                model.weight_seconds(stages[s].start, stages[s].stop, split[r])
                / model.speeds[device]
                for split in splits[s]
            )
            for (s, r), device in zip(units, device_of, strict=True)
        ),
        links=_links(model, stages),
        channels=channels,
        sums=sums,
        optimizer=tuple(s for stage in stages for s in update_seconds(model, stage)),
        contended=_filled_cards(model.network, messages + rings),
        crowded=bool(_filled_cards(model.network, messages)),
    )


def _filled_cards(network: Network, routes: Sequence[Route]) -> dict[int, float]:
    """Cards and their bandwidths that flows along all these routes at once would fill."""
    # A channel carries at most one message per direction at a time (rule 3), so the flows on a
    # card never need more than the sum of what each reaches alone.
    needed: dict[int, float] = {}
    for route in routes:
        if route.out_card != NO_CARD:
            needed[route.out_card] = needed.get(route.out_card, 0.0) + route.rate
            needed[route.in_card] = needed.get(route.in_card, 0.0) + route.rate
    bandwidths = {card: network.card_bandwidth(card) for card in needed}
    return {card: bandwidths[card] for card, rate in needed.items() if rate > bandwidths[card]}


def _routes_in_use(channel: Channel) -> list[Route]:
    back = any(channel.backward_bytes)
    return [channel.route] * any(channel.forward_bytes) + [channel.back] * back


def _check_fit(model: CostModel, stages: Sequence[StagePlan]) -> None:
    covered, layers = stages[-1].stop, model.profile.num_layers
    if covered != layers:
        raise PlanError(
            f"the plan covers {covered} layers but the profile has {layers}; "
            "use the profile that the plan was made for"
        )
    highest, devices = max(max(s.devices) for s in stages), model.cluster.num_devices
    if highest >= devices:
        raise PlanError(
            f"the plan uses device {highest} but the cluster has {devices}; "
            "take a larger cluster or plan again for this one"
        )


def _unit_seconds(
    model: CostModel, stages: Sequence[StagePlan], splits: list[list[tuple[int, ...]]]
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    forward, backward, again = [], [], []
    for stage, split in zip(stages, splits, strict=True):
        sums = model.statistics_seconds(stage.start, stage.stop, stage.devices)
        for replica, device in enumerate(stage.devices):
            speed = model.speeds[device]
            rows = [part[replica] for part in split]
            pairs = [model.stage_seconds(stage.start, stage.stop, n) for n in rows]
            if stage.recompute:
                extra = tuple(model.recompute_seconds(stage, n) / speed for n in rows)
            else:
                extra = (0.0,) * len(rows)
            # A replica without rows does nothing here, and adds zeros when the others do.
            waits = [tuple(seconds if n else 0.0 for seconds in sums) for n in rows]
            forward.append(
                tuple(f / speed + w for (f, _), (w, _) in zip(pairs, waits, strict=True))
            )
            backward.append(
                tuple(
                    b / speed + x + w for (_, b), x, (_, w) in zip(pairs, extra, waits, strict=True)
                )
            )
            again.append(extra)
    return tuple(forward), tuple(backward), tuple(again)


def _channels(
    model: CostModel,
    stages: Sequence[StagePlan],
    splits: list[list[tuple[int, ...]]],
    first: list[int],
) -> tuple[Channel, ...]:
    channels: list[Channel] = []
    for a, b in itertools.combinations(range(len(stages)), 2):
        crossing = model.crossing(
            (stages[a].start, stages[a].stop), (stages[b].start, stages[b].stop)
        )
        if crossing is None or stages[a].devices == stages[b].devices:
            continue  # nothing, or handed over in memory
        rows: dict[tuple[int, int], list[int]] = {}
        for index, (senders, receivers) in enumerate(zip(splits[a], splits[b], strict=True)):
            for sender, receiver, count in overlaps(senders, receivers):
                rows.setdefault((sender, receiver), [0] * len(splits[a]))[index] = count
        for (sender, receiver), counts in rows.items():
            ends = stages[a].devices[sender], stages[b].devices[receiver]
            channels.append(
                Channel(
                    first[a] + sender,
                    first[b] + receiver,
                    model.network.route(*ends),
                    model.network.route(ends[1], ends[0]),
                    *_message_bytes(crossing, counts),
                )
            )
    return tuple(channels)


def _links(model: CostModel, stages: Sequence[StagePlan]) -> tuple[Link, ...]:
    ranges = [(stage.start, stage.stop) for stage in stages]
    found = []
    for a, b in itertools.combinations(range(len(stages)), 2):
        crossing = model.crossing(ranges[a], ranges[b])
        if crossing is not None:
            found.append(Link(a, b, crossing.needs_grad))
    return tuple(found)


def _message_bytes(
    crossing: Crossing, counts: list[int]
) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    forward = tuple(crossing.forward_bytes(n) if n else None for n in counts)
    if not crossing.needs_grad:
        return forward, (None,) * len(counts)
    return forward, tuple(crossing.backward_bytes(n) if n else None for n in counts)


def _gradient_sums(
    model: CostModel, stages: Sequence[StagePlan], splits: list[list[tuple[int, ...]]]
) -> tuple[GradientSum, ...]:
    sums: list[GradientSum] = []
    sharing: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(stages):
        sharing.setdefault(stage.devices, []).append(number)
    for members, numbers in sharing.items():
        ring = model.network.ring(members)
        # Virtual stages share a ring, and the last one's backward is over first.
        own = [
            (number, *bucket)
            for number in reversed(numbers)
            for bucket in model.buckets(stages[number].start, stages[number].stop)
        ]
        for place, (number, first, size) in enumerate(own if len(members) > 1 else ()):
            begin = stages[number].start
            waits = model.statistics_seconds(begin, first, members)[1]
            leads = tuple(
                model.stage_seconds(begin, first, rows)[1] / model.speeds[device]
                + (waits if rows else 0.0)
                for rows, device in zip(splits[number][-1], members, strict=True)
            )
            sums.append(GradientSum((number,), size, ring, leads, queued=place > 0))
    for group in model.profile.tied:
        layers = {member.layer for member in group.members}
        holders = tuple(
            s
            for s, stage in enumerate(stages)
            if any(stage.start <= n < stage.stop for n in layers)
        )
        if len(holders) > 1 and group.parameter_bytes > 0:
            devices = sorted({device for s in holders for device in stages[s].devices})
            sums.append(GradientSum(holders, group.parameter_bytes, model.network.ring(devices)))
    return tuple(sums)
