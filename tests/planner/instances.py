"""Seeded random profiles and clusters, and an enumeration of plans that shares no code with ours."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.costs import CostModel, stage_memory
from dapple.records import LayerProfile, ModelProfile, StagePlan, TensorProfile
from dapple.simulator import step_seconds

MIB = 2**20


def random_profile(rng: random.Random, layers: int) -> ModelProfile:
    """A chain of uneven layers, measured at batch sizes 1 and 8."""
    rows = []
    tensors = []
    for number in range(layers):
        forward = 10 ** rng.uniform(-4, -2)
        growth = rng.uniform(3, 8)
        saved = 10 ** rng.uniform(5, 7.5)
        rows.append(
            LayerProfile(
                name=f"layer{number}",
                forward_seconds=(forward, forward * growth),
                backward_seconds=(2 * forward, 2 * forward * growth),
                parameter_bytes=round(10 ** rng.uniform(5, 8)),
                saved_bytes=(round(saved), round(7 * saved)),
            )
        )
        if number + 1 < layers:
            size = 10 ** rng.uniform(3.5, 6.5)
            tensors.append(
                TensorProfile(
                    name=f"t{number}",
                    producer=number,
                    consumers=(number + 1,),
                    bytes_per_sample=size,
                )
            )
    return ModelProfile(
        model="random",
        device="v100",
        batch_sizes=(1, 8),
        layers=tuple(rows),
        tensors=tuple(tensors),
    )


def random_cluster(rng: random.Random, devices: int, memory: int = 16 * 2**30) -> Cluster:
    """One machine, or two levels where the number of devices allows it."""
    kind = DeviceKind(name="v100", memory=memory)
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    per_machine = rng.choice(sizes)
    inside = Link(bandwidth=10 ** rng.uniform(9.5, 10.5), latency=5e-6)
    outside = Link(bandwidth=10 ** rng.uniform(8.5, 9.5), latency=3e-5)
    group = Machines(
        count=devices // per_machine,
        devices=per_machine,
        kind=kind,
        inside=inside,
        outside=outside,
    )
    return Cluster(name="random", machines=(group,))


def brute_force(
    profile: ModelProfile, cluster: Cluster, batch: int, micro_batch: int
) -> tuple[float, tuple[StagePlan, ...]] | None:
    """The shortest simulated step over all contiguous plans with consecutive devices.

    Warm-up is policy A; the stage's memory must hold it, or less, but at least one micro-batch.
    """
    model = CostModel(profile, cluster)
    total = math.ceil(batch / micro_batch)
    best: tuple[float, tuple[StagePlan, ...]] | None = None
    for stages in _contiguous(profile.num_layers, cluster.num_devices):
        fitting = _warm_up(model, stages, math.ceil(batch / total), total)
        if fitting is None:
            continue
        seconds = step_seconds(model, fitting, batch, total)
        if best is None or seconds < best[0]:
            best = seconds, fitting
    return best


def _contiguous(layers: int, devices: int) -> Iterator[tuple[StagePlan, ...]]:
    for count in range(1, min(layers, devices) + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            bounds = [0, *cuts, layers]
            for replicas in itertools.product(range(1, devices + 1), repeat=count):
                if sum(replicas) > devices:
                    continue
                first = [sum(replicas[:s]) for s in range(count)]
                yield tuple(
                    StagePlan(
                        start=bounds[s],
                        stop=bounds[s + 1],
                        devices=tuple(range(first[s], first[s] + replicas[s])),
                    )
                    for s in range(count)
                )


def _warm_up(
    model: CostModel, stages: tuple[StagePlan, ...], rows: int, total: int
) -> tuple[StagePlan, ...] | None:
    available = model.cluster.kind_of_device()[0].memory
    result: list[StagePlan] = []
    highest = total
    for number, stage in enumerate(stages):
        for k in range(min(len(stages) - number, highest), 0, -1):
            memory = stage_memory(model, stages, number, rows, k)
            if memory is None or memory.total <= available:
                highest = k
                result.append(stage.model_copy(update={"warmup": k}))
                break
        else:
            return None
    return tuple(result)
