"""Spans of a running step, in the simulator's timeline format."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dapple.records import Span
from dapple.records.timeline import SpanKind


class Recorder:
    """Notes what this rank does when; seconds count from `start`.

    On an accelerator a span ends when its kernels have ended, which costs overlap: spans are
    recorded there only when asked for. (Never run on a GPU so far.)

    Args:
        rank, stage, replica: whose spans these are.
        device: this rank's device.
        enabled: whether spans are noted.
    """

    def __init__(
        self, rank: int, stage: int, replica: int, device: torch.device, enabled: bool
    ) -> None:
        self._who = (rank, stage, replica)
        self._device = device
        self.enabled = enabled
        self._rows: list[tuple[SpanKind, int | None, float, float]] = []
        self._origin = time.perf_counter()

    def start(self) -> None:
        """Begin a step: forget its predecessor's spans."""
        self._rows.clear()
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Seconds since the step's start."""
        if self.enabled and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - self._origin

    @contextmanager
    def span(self, kind: SpanKind, micro_batch: int | None = None) -> Iterator[None]:
        """Note the time spent inside."""
        if not self.enabled:
            yield
            return
        begin = self.now()
        yield
        self._rows.append((kind, micro_batch, begin, self.now()))

    def spans(self) -> list[Span]:
        """The spans since the step's start."""
        rank, stage, replica = self._who
        return [
            Span(rank=rank, stage=stage, replica=replica, kind=k, micro_batch=m, start=b, end=e)
            for k, m, b, e in self._rows
        ]
