"""Hypothesis strategies for profiles and clusters, odd ones above all."""

from __future__ import annotations

from hypothesis import strategies as st

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.records import LayerProfile, ModelProfile, TensorProfile, TiedGroup, TiedMember

MIB = 2**20
_SECONDS = st.sampled_from([0.0, 1e-6, 1e-3, 2e-3, 0.5])


@st.composite
def profiles(draw: st.DrawFn, max_layers: int = 6) -> ModelProfile:
    """Chains with skips, free layers, huge layers, tied layers and unknown memory."""
    count = draw(st.integers(1, max_layers))
    sizes = draw(st.sampled_from([(1,), (4,), (1, 8)]))
    known = draw(st.booleans())
    layers = [_layer(draw, number, len(sizes), known) for number in range(count)]
    tensors = [
        TensorProfile(
            name=f"t{producer}",
            producer=producer,
            consumers=tuple(
                sorted(draw(st.sets(st.integers(producer + 1, count - 1), min_size=1, max_size=2)))
            ),
            bytes_per_sample=draw(st.sampled_from([0.0, 1e3, 1e6, 1e9])),
            fixed_bytes=draw(st.sampled_from([0.0, 0.0, 1e4])),
            needs_grad=draw(st.booleans()),
        )
        for producer in range(count - 1)
        if draw(st.integers(0, 9))
    ]
    tied = []
    if count > 1 and draw(st.booleans()):
        size = min(layers[0].parameter_bytes, layers[-1].parameter_bytes)
        members = tuple(TiedMember(layer=n, parameter="weight") for n in (0, count - 1))
        tied.append(TiedGroup(parameter_bytes=size, members=members))
    return ModelProfile(
        model="odd",
        device="d",
        batch_sizes=sizes,
        layers=tuple(layers),
        tensors=tuple(tensors),
        tied=tuple(tied),
    )


def _layer(draw: st.DrawFn, number: int, points: int, known: bool) -> LayerProfile:
    forward, backward = draw(_SECONDS), draw(_SECONDS)
    saved = draw(st.sampled_from([0, MIB, 64 * MIB]))
    return LayerProfile(
        name=f"l{number}",
        forward_seconds=tuple(forward * (n + 1) for n in range(points)),
        backward_seconds=tuple(backward * (n + 1) for n in range(points)),
        parameter_bytes=draw(st.sampled_from([0, 4, MIB, 50 * MIB, 40 * 2**30])),
        saved_bytes=tuple(saved * (n + 1) for n in range(points)) if known else None,
        optimizer_seconds=draw(st.sampled_from([0.0, 1e-3])),
        statistics_bytes=draw(st.sampled_from([(), (), (512,), (64, 4096)])),
    )


@st.composite
def clusters(draw: st.DrawFn, max_devices: int = 5) -> Cluster:
    """Groups of machines of different sizes, speeds and memories."""
    left = draw(st.integers(1, max_devices))
    groups = []
    while left:
        devices = draw(st.integers(1, left))
        left -= devices
        kind = DeviceKind(
            name=f"kind{len(groups)}",
            memory=draw(st.sampled_from([64 * MIB, 2**30, 80 * 2**30])),
            speed=draw(st.sampled_from([1.0, 1.0, 2.0, 0.3])),
        )
        inside = Link(bandwidth=draw(st.sampled_from([1e8, 1e11])), latency=1e-6)
        outside = Link(
            bandwidth=draw(st.sampled_from([1e7, 3e9])),
            latency=draw(st.sampled_from([0.0, 1e-3])),
            flow_bandwidth=draw(st.sampled_from([None, 1e9])),
        )
        groups.append(Machines(devices=devices, kind=kind, inside=inside, outside=outside))
    model = draw(st.sampled_from(["shared", "paper"]))
    return Cluster(name="odd", machines=tuple(groups), network_model=model)
