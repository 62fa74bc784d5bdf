"""How long the monitor of a run waits for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """How long the monitor waits for what. The defaults keep the promise of 10 s.

    Attributes:
        beat_seconds: between two heartbeats, and two looks for a notice. As old may be what the
            others know of the last action of a rank that was killed.
        look_seconds: between two looks at the heartbeats of others.
        stale_seconds: silence after which a rank counts as failed, and so does the store. A beat is
            late by some 0.1 s on a machine with every core busy, and by 1-2 s in an operation that
            holds the interpreter's lock (an import, the collection of a large heap, the pickling of
            a large object). Raise it for operations that hold the lock for longer; the promise of
            10 s then grows with it.
        quick_stale_seconds: the same once SIGTERM or a broken connection says that something died,
            when the question is only who.
        search_seconds: how long to look for the cause of SIGTERM or of a broken connection.
        linger_seconds: how long the rank that reports a failure stays for the others to read it.
        grace_seconds: how long a process may live after its guard() has raised.
        stall_seconds: the run has stalled when no rank begins a new action for so long.
        deserted_seconds: a rank that waits for all others gives up when one of them has closed for
            so long.
    """

    beat_seconds: float = 0.1
    look_seconds: float = 0.5
    stale_seconds: float = 5.0
    quick_stale_seconds: float = 2.0
    search_seconds: float = 4.0
    linger_seconds: float = 1.5
    grace_seconds: float = 3.0
    stall_seconds: float = 600.0
    deserted_seconds: float = 3.0
