"""What a range of layers costs, and what crosses between two ranges."""

from __future__ import annotations

from typing import NamedTuple

from dapple.cluster import Cluster
from dapple.costs.interpolation import bytes_at, seconds_at
from dapple.costs.network import Network
from dapple.costs.statistics import statistics_seconds
from dapple.errors import PlanError
from dapple.records import ModelProfile, StagePlan

Range = tuple[int, int]

BUCKET_BYTES = 4 * 2**20
"""A stage's gradients are summed in buckets of at least so many bytes."""
MOST_BUCKETS = 32
"""No stage has more buckets; those of large stages are larger."""


def bucket_bytes(total: int) -> float:
    """Bytes that fill a bucket of a stage with so many bytes of gradients (rule 7)."""
    return max(BUCKET_BYTES, total / MOST_BUCKETS)


class Crossing(NamedTuple):
    """The tensors that one stage hands to a later one, as one message.

    Attributes:
        bytes_per_row, fixed_bytes: the message forward holds rows x bytes_per_row + fixed_bytes;
            a receiver whose rows come from two senders gets the fixed bytes from both.
        gradient_bytes_per_row, gradient_fixed_bytes: the same for the gradients sent back.
        needs_grad: False if no tensor among them has a gradient; then nothing is sent back.
    """

    bytes_per_row: float = 0.0
    fixed_bytes: float = 0.0
    gradient_bytes_per_row: float = 0.0
    gradient_fixed_bytes: float = 0.0
    needs_grad: bool = False

    def forward_bytes(self, rows: int) -> float:
        """Bytes of the message that carries `rows` rows."""
        return self.bytes_per_row * rows + self.fixed_bytes

    def backward_bytes(self, rows: int) -> float:
        """Bytes of the gradients of `rows` rows."""
        return self.gradient_bytes_per_row * rows + self.gradient_fixed_bytes


class CostModel:
    """Costs of a profile's layers on a cluster; answers are cached, so keep one and reuse it.

    Args:
        profile: the model's profile.
        cluster: the devices and links.
        network_model: "shared" or "paper"; None: the cluster's own.
        overlap: a stage's AllReduce starts during its last backward, bucket by bucket (rule 7 of
            docs/semantics.md). False: after it, as one, for comparison.

    Raises:
        InputError: the network model is unknown.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        network_model: str | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.overlap = overlap
        self.network = Network(cluster, network_model or cluster.network_model)
        self.speeds = tuple(kind.speed for kind in cluster.kind_of_device())
        self._layer_seconds: dict[float, tuple[list[float], list[float]]] = {}
        self._stage_seconds: dict[tuple[int, int, float], tuple[float, float]] = {}
        self._weight_seconds: dict[tuple[int, int, float], float] = {}
        self._saved_bytes: dict[float, list[float | None]] = {}
        self._crossings: dict[tuple[Range, Range], Crossing | None] = {}
        self._parameters: dict[Range, int] = {}
        self._buckets: dict[Range, tuple[tuple[int, int], ...]] = {}
        self._optimizer: dict[Range, float] = {}
        self._statistics: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
        self._adds_statistics = any(layer.statistics_bytes for layer in profile.layers)

    def stage_seconds(self, start: int, stop: int, rows: float) -> tuple[float, float]:
        """Forward and backward seconds of layers start..stop for `rows` rows at speed 1."""
        key = (start, stop, rows)
        found = self._stage_seconds.get(key)
        if found is None:
            forward, backward = self.layer_seconds(rows)
            found = sum(forward[start:stop]), sum(backward[start:stop])
            self._stage_seconds[key] = found
        return found

    def layer_seconds(self, rows: float) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of every layer for `rows` rows at speed 1."""
        found = self._layer_seconds.get(rows)
        if found is None:
            sizes, layers = self.profile.batch_sizes, self.profile.layers
            found = (
                [seconds_at(sizes, layer.forward_seconds, rows) for layer in layers],
                [seconds_at(sizes, layer.backward_seconds, rows) for layer in layers],
            )
            self._layer_seconds[rows] = found
        return found

    def statistics_seconds(
        self, start: int, stop: int, devices: tuple[int, ...]
    ) -> tuple[float, float]:
        """Seconds that the layers' batch norms take, in a forward and backward, to add up.

        Args:
            start, stop: the layers.
            devices: of the stage's replicas.
        """
        if not self._adds_statistics or len(devices) == 1:
            return 0.0, 0.0
        found = self._statistics.get(devices)
        if found is None:
            ring = self.network.ring(devices)
            found = statistics_seconds(self.profile.layers, ring, len(devices))
            self._statistics[devices] = found
        forward, backward = found
        return sum(forward[start:stop]), sum(backward[start:stop])

    def weight_seconds(self, start: int, stop: int, rows: float) -> float:
        """The part of the layers' backward seconds that computes gradients of weights, at speed 1.

        Half of a layer's backward where the profile does not say.
        """
        key = (start, stop, rows)
        found = self._weight_seconds.get(key)
        if found is None:
            sizes, backward = self.profile.batch_sizes, self.layer_seconds(rows)[1]
            found = self._weight_seconds[key] = sum(
                backward[n] / 2
                if layer.weight_seconds is None
                else seconds_at(sizes, layer.weight_seconds, rows)
                for n, layer in enumerate(self.profile.layers[start:stop], start)
            )
        return found

    def recompute_seconds(self, stage: StagePlan, rows: float) -> float:
        """Seconds at speed 1 that a stage's backward spends on running forwards again."""
        ranges = recomputed_ranges(stage, len(self.profile.layers))
        return sum(self.stage_seconds(a, b, rows)[0] for a, b in ranges)

    def optimizer_seconds(self, start: int, stop: int) -> float:
        """Seconds of one update of the layers' parameters at speed 1."""
        found = self._optimizer.get((start, stop))
        if found is None:
            found = sum(layer.optimizer_seconds for layer in self.profile.layers[start:stop])
            self._optimizer[start, stop] = found
        return found

    def parameter_bytes(self, start: int, stop: int) -> int:
        """Bytes of the layers' parameters, each tied parameter once."""
        found = self._parameters.get((start, stop))
        if found is None:
            found = sum(layer.parameter_bytes for layer in self.profile.layers[start:stop])
            for group in self.profile.tied:
                holders = {m.layer for m in group.members if start <= m.layer < stop}
                found -= max(0, len(holders) - 1) * group.parameter_bytes
            self._parameters[start, stop] = found = max(0, found)
        return found

    def buckets(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """How the gradients that only a stage's own replicas add up are cut for their AllReduce.

        Layers from the last to the first fill a bucket until it has its size: see rule 7.

        Returns:
            Per bucket its first layer and its bytes, in the order in which they are complete.
        """
        found = self._buckets.get((start, stop))
        if found is None:
            found = self._buckets[start, stop] = self._find_buckets(start, stop)
        return found

    def _find_buckets(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        sizes = [layer.parameter_bytes for layer in self.profile.layers[start:stop]]
        for group in self.profile.tied:
            holders = sorted({member.layer for member in group.members})
            inside = [layer for layer in holders if start <= layer < stop]
            # Complete at its first layer, the last in the backward; spread ones have their own sum.
            for layer in inside[1:] if len(inside) == len(holders) else inside:
                sizes[layer - start] = max(0, sizes[layer - start] - group.parameter_bytes)
        total = sum(sizes)
        if not self.overlap:
            return ((start, total),) if total else ()
        enough = bucket_bytes(total)
        buckets, filled = [], 0
        for layer in range(stop - 1, start - 1, -1):
            filled += sizes[layer - start]
            if filled >= enough:
                buckets.append((layer, filled))
                filled = 0
        # The rest joins the last bucket's end: its first layer is the lowest that has parameters.
        if filled:
            lowest = next(layer for layer in range(start, stop) if sizes[layer - start])
            buckets.append((lowest, filled))
        return tuple(buckets)

    def saved_bytes(self, layer: int, rows: float) -> float | None:
        """Activations that a layer keeps for its backward; None: not measured."""
        found = self._saved_bytes.get(rows)
        if found is None:
            sizes = self.profile.batch_sizes
            measured = (one.saved_bytes for one in self.profile.layers)
            found = [None if v is None else bytes_at(sizes, v, rows) for v in measured]
            self._saved_bytes[rows] = found
        return found[layer]

    def workspace_bytes(self, start: int, stop: int, rows: float) -> float:
        """The largest workspace among the layers; a layer without the figure counts as none."""
        layers, sizes = self.profile.layers[start:stop], self.profile.batch_sizes
        measured = (layer.workspace_bytes for layer in layers)
        return max((bytes_at(sizes, v, rows) for v in measured if v is not None), default=0.0)

    def cast_bytes(self, start: int, stop: int) -> int:
        """What autocast keeps of the layers' weights for a step."""
        return sum(layer.cast_bytes for layer in self.profile.layers[start:stop])

    def crossing(self, producer: Range, consumer: Range) -> Crossing | None:
        """What layers of the range `producer` hand to layers of the range `consumer`.

        None if nothing crosses. Inputs of the model cost nothing: every rank slices its own
        batch. A profile that lists no tensors at all is a chain whose transfers are free.
        """
        key = (producer, consumer)
        if key not in self._crossings:
            self._crossings[key] = self._find_crossing(producer, consumer)
        return self._crossings[key]

    def _find_crossing(self, producer: Range, consumer: Range) -> Crossing | None:
        if not self.profile.tensors:
            return Crossing(needs_grad=True) if producer[1] == consumer[0] else None
        crossing = [
            tensor
            for tensor in self.profile.tensors
            if producer[0] <= tensor.producer < producer[1]
            and any(consumer[0] <= layer < consumer[1] for layer in tensor.consumers)
        ]
        if not crossing:
            return None
        trained = [tensor for tensor in crossing if tensor.needs_grad]
        return Crossing(
            sum(tensor.bytes_per_sample for tensor in crossing),
            sum(tensor.fixed_bytes for tensor in crossing),
            sum(tensor.bytes_per_sample for tensor in trained),
            sum(tensor.fixed_bytes for tensor in trained),
            bool(trained),
        )


def recomputed_ranges(stage: StagePlan, num_layers: int) -> tuple[Range, ...]:
    """The half-open layer ranges whose forward the stage runs again.

    The model's last layer is not among them: the loss keeps what it needs of it.

    Args:
        stage: a stage of a plan.
        num_layers: layers of the model.

    Raises:
        PlanError: the ranges are not ascending ranges of the stage's own layers.
    """
    ranges = stage.recompute or ()
    if ranges is True:
        ranges = ((stage.start, stage.stop),)
    position = stage.start
    for start, stop in ranges:
        if not position <= start < stop <= stage.stop:
            raise PlanError(
                f"recompute names layers {start}..{stop} in a stage of layers {stage.start}.."
                f"{stage.stop}; give ascending half-open ranges within the stage that do not overlap"
            )
        position = stop
    most = num_layers - 1
    return tuple((start, min(stop, most)) for start, stop in ranges if start < most)
