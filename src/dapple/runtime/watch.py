"""How a trainer watches the other ranks: by a monitor where there are any, else not at all."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from dapple.runtime.failure import Monitor
from dapple.runtime.heartbeat import Progress

_RUNS = itertools.count()


class ActionLog(Protocol):
    """Where the last action of a rank is noted."""

    def set(self, action: str, micro_batch: int | None) -> None:
        """Note an action."""


class Watch(Protocol):
    """Ends every rank when one fails."""

    @property
    def progress(self) -> ActionLog:
        """Where this rank notes what it does."""

    def guard(self) -> AbstractContextManager[None]:
        """Around work: an exception inside is reported to all ranks."""

    def close(self) -> None:
        """End in order, together with all ranks."""


class MonitorWatch:
    """A `Monitor` for a rank that torchrun or another launcher has started.

    A script that ends without `close` and without an error is closed at its exit: it has done its
    work, and the other ranks need not take it for dead.
    """

    def __init__(self, rank: int, stage: int) -> None:
        self._progress = Progress(rank, stage)
        # Each trainer of a process has a notice board of its own.
        self._monitor = Monitor.from_environment(self._progress, run=next(_RUNS))
        self._closed = False
        atexit.register(self._close_at_exit)

    @property
    def progress(self) -> ActionLog:
        """Where this rank notes what it does."""
        return self._progress

    def guard(self) -> AbstractContextManager[None]:
        """Around work: an exception inside is reported to all ranks."""
        return self._monitor.guard()

    def close(self) -> None:
        """End in order, together with all ranks."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._close_at_exit)
            self._monitor.close()

    def _close_at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:
            self.close()


class NoWatch:
    """For a single process, and for transports without a launcher.

    Args:
        progress: where actions are noted; by default nowhere.
    """

    def __init__(self, progress: ActionLog | None = None) -> None:
        self._progress = progress or self

    @property
    def progress(self) -> ActionLog:
        """Where this rank notes what it does."""
        return self._progress

    def set(self, action: str, micro_batch: int | None) -> None:
        """Note nothing."""

    def guard(self) -> AbstractContextManager[None]:
        """Around work; does nothing."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to end."""


def watch_ranks(rank: int, stage: int, launched: bool) -> Watch:
    """The watch of a rank: a monitor if a launcher started it and signals can be taken here."""
    main = threading.current_thread() is threading.main_thread()
    if launched and main and {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"} <= set(os.environ):
        return MonitorWatch(rank, stage)
    return NoWatch()
