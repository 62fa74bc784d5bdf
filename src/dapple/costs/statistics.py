"""What the batch norms of a stage add up over its replicas: docs/semantics.md, "Batch norm"."""

from __future__ import annotations

from collections.abc import Sequence

from dapple.costs.network import Ring
from dapple.records import LayerProfile


def statistics_seconds(
    layers: Sequence[LayerProfile], ring: Ring, replicas: int
) -> tuple[list[float], list[float]]:
    """Seconds of each layer's sums in one forward and in one backward, each on its own.

    In the forward every replica contributes mean and variance of each channel, beside those of the
    others; in the backward two sums over rows of each channel.

    Args:
        layers: the layers.
        ring: the replicas' AllReduce.
        replicas: how many they are.
    """
    if replicas == 1:
        return [0.0] * len(layers), [0.0] * len(layers)
    return (
        [sum(ring.seconds(replicas * n) for n in layer.statistics_bytes) for layer in layers],
        [sum(ring.seconds(n) for n in layer.statistics_bytes) for layer in layers],
    )
