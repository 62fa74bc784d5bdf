"""Spans of a running step, in the simulator's timeline format."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

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
        self._rank, self._stage, self._replica = rank, stage, replica
        self._device = device
        self.enabled = enabled
        self._synchronised = enabled and device.type != "cpu"
        self._rows: list[tuple[SpanKind, int | None, int, float, float]] = []
        self._open: list[tuple[SpanKind, int | None, int, float]] = []
        self._origin = time.perf_counter()

    def start(self) -> None:
        """Begin a step: forget its predecessor's spans."""
        self._rows.clear()
        self._open.clear()
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Seconds since the step's start."""
        if self._synchronised:
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - self._origin

    def span(
        self, kind: SpanKind, micro_batch: int | None = None, stage: int | None = None
    ) -> AbstractContextManager[None]:
        """Note the time spent inside; `stage` if it is another of the rank's stages.

        A span within another one interrupts it, so that no two overlap, and belongs to the same
        micro-batch and stage.
        """
        return _Noting(self, kind, micro_batch, stage) if self.enabled else _NOTHING

    def begin(
        self, kind: SpanKind, micro_batch: int | None = None, stage: int | None = None
    ) -> None:
        """A span begins."""
        now = self.now()
        if self._open:
            outer, number, where, since = self._open[-1]
            self._rows.append((outer, number, where, since, now))
            micro_batch = number if micro_batch is None else micro_batch
            stage = where if stage is None else stage
        self._open.append((kind, micro_batch, self._stage if stage is None else stage, now))

    def end(self) -> None:
        """The span that began last ends, and the one that it interrupted goes on."""
        now = self.now()
        self._rows.append((*self._open.pop(), now))
        if self._open:
            self._open[-1] = (*self._open[-1][:3], now)

    def spans(self) -> list[Span]:
        """The spans since the step's start."""
        rank, replica = self._rank, self._replica
        return [
            Span(rank=rank, stage=s, replica=replica, kind=k, micro_batch=m, start=b, end=e)
            for k, m, s, b, e in self._rows
        ]


class _Noting:
    """A span in a `with` statement. A class, for it costs a quarter of a generator's time."""

    __slots__ = ("_kind", "_micro_batch", "_recorder", "_stage")

    def __init__(
        self, recorder: Recorder, kind: SpanKind, micro_batch: int | None, stage: int | None
    ) -> None:
        self._recorder = recorder
        self._kind = kind
        self._micro_batch = micro_batch
        self._stage = stage

    def __enter__(self) -> None:
        self._recorder.begin(self._kind, self._micro_batch, self._stage)

    def __exit__(self, *error: object) -> None:
        self._recorder.end()


_NOTHING = nullcontext()
