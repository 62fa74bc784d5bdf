"""The most bytes of tensors alive at once on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dapple.storages import StorageCounter


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
        self._counter = StorageCounter(resident) if device.type == "cpu" else None
        self.peak_bytes = 0

    def __enter__(self) -> MemoryMeter:
        if self._counter is not None:
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        else:
            torch.accelerator.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._counter is not None:
            self._counter.__exit__(*error)  # type: ignore[no-untyped-call]
            self.peak_bytes = self._counter.peak_bytes
        else:
            self.peak_bytes = int(torch.accelerator.max_memory_allocated(self._device))
