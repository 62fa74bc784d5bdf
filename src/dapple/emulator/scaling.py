"""The profile of what an emulation runs: sizes in whole floats, seconds and bytes scaled."""

from __future__ import annotations

from collections.abc import Sequence

from dapple.errors import InputError
from dapple.records import LayerProfile, ModelProfile, TensorProfile

FLOAT = 4
"""Bytes of a float32, of which all emulated tensors consist."""


def emulated_profile(
    profile: ModelProfile, *, time_scale: float = 1.0, byte_scale: float = 1.0
) -> ModelProfile:
    """What an emulation of a profile takes and holds, exactly.

    Args:
        profile: the model's profile.
        time_scale: factor for all seconds.
        byte_scale: factor for all bytes. No tensor becomes smaller than one float, and every layer
            has at least one float of parameters.

    Raises:
        InputError: a factor is not positive and finite.
    """
    for name, factor in (("time", time_scale), ("byte", byte_scale)):
        if not 0 < factor < float("inf"):
            raise InputError(f"the {name} scale is {factor}; give a positive number")
    tensors = _tensors(profile, byte_scale)
    return ModelProfile(
        model=profile.model,
        device="emulated",
        source=f"emulation of {profile.source}, time x {time_scale:g}, bytes x {byte_scale:g}",
        batch_sizes=profile.batch_sizes,
        layers=tuple(
            _layer(profile, tensors, number, time_scale, byte_scale)
            for number in range(profile.num_layers)
        ),
        tensors=tensors,
        tied=tuple(
            group.model_copy(
                update={"parameter_bytes": _floats(group.parameter_bytes * byte_scale)}
            )
            for group in profile.tied
        ),
    )


def _layer(
    profile: ModelProfile,
    tensors: Sequence[TensorProfile],
    number: int,
    time_scale: float,
    byte_scale: float,
) -> LayerProfile:
    layer, largest = profile.layers[number], profile.batch_sizes[-1]
    tied = [
        _floats(group.parameter_bytes * byte_scale)
        for group in profile.tied
        if any(member.layer == number for member in group.members)
    ]
    # A float of its own beside the tied ones, so that every layer has a gradient.
    own = max(_floats(layer.parameter_bytes * byte_scale) - sum(tied), FLOAT)
    saved = None
    if layer.saved_bytes is not None:
        # In proportion to the rows: the emulated layer keeps one tensor with rows.
        each = _floats(layer.saved_bytes[-1] * byte_scale / largest)
        saved = tuple(each * rows for rows in profile.batch_sizes)
    workspace = None
    if len(profile.batch_sizes) > 1:  # else what does not grow with the rows would be scaled, too
        # Its backward makes all gradients at once, while it still has those of its outputs.
        passing = [t for t in tensors if t.needs_grad and number in (t.producer, *t.consumers)]
        fixed = own + sum(tied) + int(sum(t.fixed_bytes for t in passing))
        row = int(sum(t.bytes_per_sample for t in passing))
        workspace = tuple(fixed + row * rows for rows in profile.batch_sizes)
    return LayerProfile(
        name=layer.name,
        forward_seconds=tuple(t * time_scale for t in layer.forward_seconds),
        backward_seconds=tuple(t * time_scale for t in layer.backward_seconds),
        parameter_bytes=own + sum(tied),
        saved_bytes=saved,
        workspace_bytes=workspace,
        optimizer_seconds=layer.optimizer_seconds * time_scale,
        parameter_sizes=(own, *tied),
    )


def _tensors(profile: ModelProfile, byte_scale: float) -> tuple[TensorProfile, ...]:
    """The profile's tensors between layers, none of them empty.

    A layer that hands nothing on would not be run at all: it hands one float a row to the next.
    """
    found = [_tensor(tensor, byte_scale) for tensor in profile.tensors if tensor.producer >= 0]
    makers = {tensor.producer for tensor in found if tensor.consumers}
    found += [
        TensorProfile(
            name=f"after {number}", producer=number, consumers=(number + 1,), bytes_per_sample=FLOAT
        )
        for number in range(profile.num_layers - 1)
        if number not in makers
    ]
    return tuple(found)


def _tensor(tensor: TensorProfile, byte_scale: float) -> TensorProfile:
    each, fixed = _floats(tensor.bytes_per_sample * byte_scale), tensor.fixed_bytes * byte_scale
    sizes = {"bytes_per_sample": float(each), "fixed_bytes": float(_floats(fixed))}
    if not any(sizes.values()):
        sizes["bytes_per_sample"] = float(FLOAT)
    return tensor.model_copy(update=sizes)


def _floats(size: float) -> int:
    """Bytes in whole floats; nothing stays nothing."""
    return FLOAT * max(1, round(size / FLOAT)) if size > 0 else 0
