"""The profile of a model on a device: what every layer costs and which tensors join them."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from dapple.records.base import Record
from dapple.units import check_not_tiny

# Beyond these limits (30 years, 1 EiB) a number is a slip, and sums would overflow.
Seconds = Annotated[float, Field(ge=0, le=1e9), AfterValidator(check_not_tiny)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
MeanBytes = Annotated[float, Field(ge=0, le=2**60), AfterValidator(check_not_tiny)]


_PER_BATCH_SIZE = (
    "forward_seconds",
    "backward_seconds",
    "weight_seconds",
    "saved_bytes",
    "workspace_bytes",
)


class LayerProfile(Record):
    """One layer. Lists run over the profile's `batch_sizes`.

    Attributes:
        name: where the layer stands in the model, such as "blocks.3".
        forward_seconds: time of one forward, s.
        backward_seconds: time of one backward, s.
        parameter_bytes: parameters that the layer reads, tied ones included.
        saved_bytes: activations kept from forward to backward. A tensor between layers counts at
            its producer. None: not measured, memory is unchecked.
        workspace_bytes: most bytes alive for a moment inside the layer beyond saved, parameters
            and gradients. None: not measured.
        weight_seconds: the part of `backward_seconds` that computes gradients of weights, which a
            split backward can do later. None: not measured, half of it.
        cast_bytes: copies of its weights in the type of autocast, kept from the first forward of a
            step to its last backward.
        optimizer_seconds: time of one optimizer update of the layer's parameters, s.
        parameter_sizes: bytes of each of its parameters, which add up to `parameter_bytes`. None:
            not known.
        statistics_bytes: per batch norm in training mode the bytes of two numbers per channel, which
            the replicas of a stage add up for every micro-batch.
    """

    name: str
    forward_seconds: tuple[Seconds, ...]
    backward_seconds: tuple[Seconds, ...]
    parameter_bytes: Bytes = 0
    saved_bytes: tuple[Bytes, ...] | None = None
    workspace_bytes: tuple[Bytes, ...] | None = None
    weight_seconds: tuple[Seconds, ...] | None = None
    cast_bytes: Bytes = 0
    optimizer_seconds: Seconds = 0.0
    parameter_sizes: tuple[Bytes, ...] | None = None
    statistics_bytes: tuple[Bytes, ...] = ()


class TensorProfile(Record):
    """A tensor that one layer hands to later ones; it crosses every cut between them.

    Attributes:
        name: its name in the graph.
        producer: number of the layer that makes it; -1 for an input of the model.
        consumers: numbers of the layers that read it, ascending.
        bytes_per_sample: bytes for each row of the batch.
        fixed_bytes: bytes that do not grow with the batch.
        needs_grad: a gradient of the same size travels back.
    """

    name: str
    producer: Annotated[int, Field(ge=-1)]
    consumers: tuple[Annotated[int, Field(ge=0)], ...]
    bytes_per_sample: MeanBytes = 0.0
    fixed_bytes: MeanBytes = 0.0
    needs_grad: bool = True


class TiedMember(Record):
    """One holder of a tied parameter: layer number and the parameter's name there."""

    layer: Annotated[int, Field(ge=0)]
    parameter: str


class TiedGroup(Record):
    """Layers that read one and the same parameter.

    Attributes:
        parameter_bytes: size of the shared parameter; each member's layer counts it as well.
        members: the layers that read it.
    """

    parameter_bytes: Bytes
    members: tuple[TiedMember, ...] = Field(min_length=2)


class ModelProfile(Record):
    """Everything the planner knows of a model. See docs/formats.md.

    Attributes:
        batch_sizes: rows per measurement, ascending; times in between are interpolated.
        source: how it came about: "measured", "analytic", "text" or a hand's note.
        concurrency: processes that were busy on the machine while it was measured.
        model_fingerprint: identifies the captured model; a plan for another model is refused.
        notes: what capture found out about the model that its user should know.
    """

    format: Literal["dapple-profile"] = "dapple-profile"
    version: Literal[1] = 1
    model: str
    device: str
    dtype: str = "float32"
    source: str = "measured"
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    layers: tuple[LayerProfile, ...] = Field(min_length=1)
    tensors: tuple[TensorProfile, ...] = ()
    tied: tuple[TiedGroup, ...] = ()
    concurrency: Annotated[int, Field(ge=1)] = 1
    model_fingerprint: str | None = None
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> ModelProfile:
        count, sizes = len(self.layers), self.batch_sizes
        if any(b <= a for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"batch_sizes {list(sizes)} must ascend")
        for number, layer in enumerate(self.layers):
            for field in _PER_BATCH_SIZE:
                values = getattr(layer, field)
                if values is not None and len(values) != len(sizes):
                    raise ValueError(
                        f"layer {number} ({layer.name}): {field} has {len(values)} values "
                        f"for {len(sizes)} batch sizes"
                    )
            if any(
                w > b
                for w, b in zip(layer.weight_seconds or (), layer.backward_seconds, strict=False)
            ):
                raise ValueError(
                    f"layer {number} ({layer.name}): weight_seconds is a part of backward_seconds "
                    "and can't be larger"
                )
            if layer.parameter_sizes is not None:
                total = sum(layer.parameter_sizes)
                if total != layer.parameter_bytes:
                    raise ValueError(
                        f"layer {number} ({layer.name}): parameter_sizes add up to {total}, but "
                        f"parameter_bytes is {layer.parameter_bytes}"
                    )
        self._check_tied()
        for tensor in self.tensors:
            if any(not tensor.producer < consumer < count for consumer in tensor.consumers):
                raise ValueError(
                    f"tensor {tensor.name}: consumers {list(tensor.consumers)} must be layers "
                    f"after its producer {tensor.producer} and below {count}"
                )
        return self

    def without_statistics(self) -> ModelProfile:
        """The same for batch norms that add up nothing: each replica takes its own statistics."""
        layers = [layer.model_copy(update={"statistics_bytes": ()}) for layer in self.layers]
        return self.model_copy(update={"layers": tuple(layers)})

    def _check_tied(self) -> None:
        for group in self.tied:
            name = group.members[0].parameter
            if any(member.layer >= len(self.layers) for member in group.members):
                raise ValueError(f"tied group {name} names a layer >= {len(self.layers)}")
            for member in group.members:
                sizes = self.layers[member.layer].parameter_sizes
                if sizes is not None and group.parameter_bytes not in sizes:
                    raise ValueError(
                        f"tied group {name} has {group.parameter_bytes} bytes, and no parameter of "
                        f"layer {member.layer} has so many in parameter_sizes"
                    )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)
