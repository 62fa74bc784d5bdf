"""Outputs that are no values: a cache of keys and values in a language model's output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

VALUES = (torch.Tensor, int, float, complex, bool, str, type(None))
"""What may go into a model and come out of it."""


@contextmanager
def objects_left_out(model: nn.Module) -> Iterator[list[str]]:
    """Have the model return None where it returns objects that `torch.export` knows nothing of.

    Training reads none of them. Tensors, numbers, strings and None stay, in containers of any
    kind that pytree knows.

    Yields:
        A list that is filled with what was left out, in words.
    """
    found: list[str] = []

    def leave_out(module: nn.Module, arguments: Any, output: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: leaf if isinstance(leaf, VALUES) else _note(found, output, leaf), output
        )

    handle = model.register_forward_hook(leave_out)
    try:
        yield found
    finally:
        handle.remove()


def _note(found: list[str], output: Any, leaf: Any) -> None:
    items = output.items() if isinstance(output, Mapping) else ()
    name = next((f'"{key}"' for key, value in items if value is leaf), "a part")
    note = f"{name} of the output is left out: {type(leaf).__name__} is no tensor and no number"
    if note not in found:
        found.append(note)
