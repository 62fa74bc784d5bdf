"""Small profiles, clusters and plans for tests, by hand and by hypothesis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.records import (
    LayerProfile,
    ModelProfile,
    Plan,
    StagePlan,
    TensorProfile,
    TiedGroup,
    TiedMember,
)


def chain(
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    bytes_per_row: float = 0.0,
    parameter_bytes: int = 0,
    tensors: Sequence[TensorProfile] | None = None,
    tied: Sequence[TiedGroup] = (),
    optimizer_seconds: float = 0.0,
) -> ModelProfile:
    """Layers in a row, measured at one row; each hands one tensor to the next."""
    layers = tuple(
        LayerProfile(
            name=f"layers.{i}",
            forward_seconds=(f,),
            backward_seconds=(b,),
            parameter_bytes=parameter_bytes,
            optimizer_seconds=optimizer_seconds,
        )
        for i, (f, b) in enumerate(zip(forward, backward, strict=True))
    )
    if tensors is None:
        tensors = [
            TensorProfile(
                name=f"t{i}", producer=i, consumers=(i + 1,), bytes_per_sample=bytes_per_row
            )
            for i in range(len(layers) - 1)
        ]
    return ModelProfile(
        model="chain", device="hand", batch_sizes=(1,), layers=layers, tensors=tuple(tensors),
        tied=tuple(tied),
    )  # fmt: skip


def cluster(
    machines: int,
    devices: int = 1,
    *,
    bandwidth: float = 1.0,
    latency: float = 0.0,
    flow_bandwidth: float | None = None,
    allreduce_bandwidth: float | None = None,
    inside: Link | None = None,
    speed: float = 1.0,
) -> Cluster:
    """Equal machines; bandwidths in bytes per second, small numbers for hands."""
    outside = Link(
        bandwidth=bandwidth, latency=latency, flow_bandwidth=flow_bandwidth,
        allreduce_bandwidth=allreduce_bandwidth,
    )  # fmt: skip
    group = Machines(
        count=machines,
        devices=devices,
        kind=DeviceKind(name="hand", memory=1 << 30, speed=speed),
        inside=inside or Link(bandwidth=1e30),
        outside=outside,
    )
    return Cluster(name="hand", machines=(group,))


def plan(
    replicas: Sequence[int],
    batch: int,
    micro_batches: int,
    where: Cluster,
    *,
    warmup: Sequence[int] | None = None,
    cuts: Sequence[int] | None = None,
    **fields: object,
) -> Plan:
    """Stages of one layer each, unless cuts (the ends of the stages) are given."""
    ends = list(cuts or range(1, len(replicas) + 1))
    devices = iter(range(sum(replicas)))
    stages = tuple(
        StagePlan(
            start=start,
            stop=stop,
            devices=tuple(itertools.islice(devices, count)),
            warmup=(warmup or range(len(ends), 0, -1))[number],
        )
        for number, (start, stop, count) in enumerate(zip([0, *ends], ends, replicas, strict=False))
    )
    return Plan.model_validate(
        {
            "model": "chain", "global_batch_size": batch, "num_micro_batches": micro_batches,
            "micro_batch_size": -(-batch // micro_batches), "stages": stages, "cluster": where,
            **fields,
        }
    )  # fmt: skip


seconds = st.floats(0.01, 10.0)


@st.composite
def random_plans(
    draw: st.DrawFn, *, contended: bool, even: bool = False
) -> tuple[Plan, ModelProfile]:
    """A profile with skips and tied layers, and a plan of up to four stages for it.

    Args:
        contended: machines hold several devices whose flows share a slow card; otherwise cards
            are so wide that no flow slows another one down.
        even: replicas divide the rows, so that many of them run alike.
    """
    count = draw(st.integers(1, 4))
    num_layers = draw(st.integers(count, count + 2))
    cuts = draw(st.permutations(range(1, num_layers)))[: count - 1]
    ends = [*sorted(cuts), num_layers]
    replicas = [draw(st.sampled_from([1, 2, 4]) if even else st.integers(1, 3)) for _ in cuts]
    replicas.append(draw(st.sampled_from([1, 2, 4]) if even else st.integers(1, 3)))
    micro_batches = draw(st.integers(1, 6))
    warmup = sorted((draw(st.integers(1, 6)) for _ in range(count)), reverse=True)
    profile = draw(random_profiles(num_layers))
    devices = draw(st.integers(1, 4)) if contended else draw(st.integers(1, 2))
    batch = 4 * micro_batches * draw(st.integers(1, 2)) if even else draw(st.integers(1, 14))
    where = cluster(
        machines=-(-sum(replicas) // devices),
        devices=devices,
        bandwidth=draw(st.floats(0.5, 5.0)) if contended else 1e9,
        flow_bandwidth=draw(st.none() | st.floats(0.1, 3.0)) if contended else 2.0,
        allreduce_bandwidth=draw(st.none() | st.floats(0.5, 3.0)) if contended else 3.0,
        latency=draw(st.sampled_from([0.0, 0.1])),
        inside=Link(bandwidth=7.0, latency=draw(st.sampled_from([0.0, 0.05]))),
        speed=draw(st.sampled_from([1.0, 2.0])),
    )
    made = plan(
        replicas, batch, micro_batches, where, warmup=warmup, cuts=ends,
        schedule=draw(st.sampled_from(["early-backward", "gpipe"])),
        network_model="shared" if contended else draw(st.sampled_from(["shared", "paper"])),
    )  # fmt: skip
    return made, profile


@st.composite
def random_profiles(draw: st.DrawFn, num_layers: int) -> ModelProfile:
    """Layers with random times, chain tensors, some skips, some tensors without gradient."""
    tensors = []
    for producer in range(-1, num_layers - 1):
        skips = draw(st.sets(st.integers(producer + 1, num_layers - 1), max_size=2))
        tensors.append(
            TensorProfile(
                name=f"t{producer}",
                producer=producer,
                consumers=tuple(sorted(skips | {producer + 1})),
                bytes_per_sample=draw(st.just(0.0) | st.floats(1e-3, 4.0)),
                fixed_bytes=draw(st.sampled_from([0.0, 0.5])),
                needs_grad=draw(st.sampled_from([True, True, False])),
            )
        )
    tied = []
    if num_layers > 1 and draw(st.booleans()):
        members = tuple(TiedMember(layer=n, parameter="weight") for n in (0, num_layers - 1))
        tied.append(TiedGroup(parameter_bytes=2, members=members))
    return chain(
        [draw(seconds) for _ in range(num_layers)],
        [draw(seconds) for _ in range(num_layers)],
        tensors=tensors,
        tied=tied,
        parameter_bytes=draw(st.sampled_from([0, 5])) + 2 * bool(tied),
        optimizer_seconds=draw(st.sampled_from([0.0, 0.5])),
    )
