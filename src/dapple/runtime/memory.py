"""The most bytes of tensors alive at once on one rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryMeter:
    """Measures the peak of a step: `with meter: step()`, then `meter.peak_bytes`.

    On CPU it counts the storages that operators return until they are freed, on top of those that
    were there before; memory inside an operator is not seen, nor is the user's own batch. On an
    accelerator it asks the allocator. (Never run on a GPU so far.)

    Args:
        device: the rank's device.
        resident: tensors that exist already: parameters, gradients, optimizer state.
    """

    def __init__(self, device: torch.device, resident: Iterable[torch.Tensor]) -> None:
        self._device = device
        self._mode = _StorageCounter(resident) if device.type == "cpu" else None
        self.peak_bytes = 0

    def __enter__(self) -> MemoryMeter:
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        else:
            torch.accelerator.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
            self.peak_bytes = self._mode.peak_bytes
        else:
            self.peak_bytes = int(torch.accelerator.max_memory_allocated(self._device))


class _StorageCounter(TorchDispatchMode):
    def __init__(self, resident: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        for tensor in resident:
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
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

        self._alive[key] = (size, weakref.ref(storage, freed))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
