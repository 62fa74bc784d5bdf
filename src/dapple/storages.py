"""Counts the bytes of the tensor storages that are alive, on CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class StorageCounter(TorchDispatchMode):
    """While active, notes each storage that an operator returns, until it is freed.

    Memory that an operator uses and frees inside is not seen, nor is what comes from outside, such
    as the user's batch: a view of it is not new.

    Args:
        resident: tensors that exist already and count as alive.

    Attributes:
        live_bytes: bytes alive now.
        peak_bytes: most bytes alive since `reset_peak`.
    """

    def __init__(self, resident: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        for tensor in resident:
            self._note(tensor)

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note what it returns."""
        given = {
            leaf.untyped_storage()._cdata
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self._note(leaf)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self.live_bytes -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
