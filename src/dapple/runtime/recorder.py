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
        self._open: list[tuple[SpanKind, int | None, float]] = []
        self._origin = time.perf_counter()

    def start(self) -> None:
        """Begin a step: forget its predecessor's spans."""
        self._rows.clear()
        self._open.clear()
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Seconds since the step's start."""
        if self.enabled and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - self._origin

    @contextmanager
    def span(self, kind: SpanKind, micro_batch: int | None = None) -> Iterator[None]:
        """Note the time spent inside.

        A span within another one interrupts it, so that no two overlap, and belongs to the same
        micro-batch.
        """
        if not self.enabled:
            yield
            return
        begin = self.now()
        if self._open:
            outer, number, since = self._open[-1]
            self._rows.append((outer, number, since, begin))
            micro_batch = number if micro_batch is None else micro_batch
        self._open.append((kind, micro_batch, begin))
        try:
            yield
        finally:
            end = self.now()
            self._rows.append((*self._open.pop(), end))
            if self._open:
                self._open[-1] = (*self._open[-1][:2], end)

    def spans(self) -> list[Span]:
        """The spans since the step's start."""
        rank, stage, replica = self._who
        return [
            Span(rank=rank, stage=stage, replica=replica, kind=k, micro_batch=m, start=b, end=e)
            for k, m, b, e in self._rows
        ]
