"""A profile as a table for the terminal."""

from __future__ import annotations

from rich.table import Table

from dapple.records import ModelProfile
from dapple.units import format_bytes, format_seconds


def profile_table(profile: ModelProfile) -> Table:
    """A profile, one row per layer; times and bytes are those of the largest batch measured."""
    rows = profile.batch_sizes[-1]
    title = f"{profile.model} on {profile.device}: {profile.num_layers} layers, batch of {rows}"
    busy = f", {profile.concurrency} processes busy" if profile.concurrency > 1 else ""
    table = Table(title=title + busy)
    table.add_column("layer", justify="right")
    table.add_column("name")
    for name in ("forward", "backward", "parameters", "saved", "workspace", "output"):
        table.add_column(name, justify="right")
    for number, layer in enumerate(profile.layers):
        out = sum(
            t.bytes_per_sample * rows + t.fixed_bytes
            for t in profile.tensors
            if t.producer == number
        )
        table.add_row(
            str(number),
            layer.name,
            format_seconds(layer.forward_seconds[-1]),
            format_seconds(layer.backward_seconds[-1]),
            format_bytes(layer.parameter_bytes),
            "-" if layer.saved_bytes is None else format_bytes(layer.saved_bytes[-1]),
            "-" if layer.workspace_bytes is None else format_bytes(layer.workspace_bytes[-1]),
            format_bytes(out),
        )
    return table
