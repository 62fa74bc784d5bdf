"""What a rank does right now, and how long each rank has been silent.

A rank's own thread sets its `Progress` on the hot path; the monitor's thread (failure.py) turns it
into a `Beat` in the store ten times a second, and reads the beats of others into `Pulses`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

# A rank in one of these waits for others, and is not the one to blame when nothing moves.
WAITING_ACTIONS = frozenset({"send", "receive", "allreduce", "barrier", "close"})

# In one of these a rank waits for all others: one of them that has left will not come.
JOINT_ACTIONS = frozenset({"barrier", "save weights", "write results"})


class Progress:
    """The last action of a rank, for the reports of this rank and of the others.

    Args:
        rank: this process's rank.
        stage: the stage it runs, None outside of a pipeline.
    """

    __slots__ = ("now", "rank", "stage")

    def __init__(self, rank: int, stage: int | None) -> None:
        self.rank = rank
        self.stage = stage
        self.now: tuple[str, int | None] = ("start", None)

    def set(self, action: str, micro_batch: int | None = None) -> None:
        """Note the action that starts now; micro_batch is None outside of one.

        Any word is fine; call the waits for other ranks as in WAITING_ACTIONS.

        One assignment of a new tuple (about 50 ns): atomic for readers in other threads, who see a
        repeated action as a change because the tuple is another object.
        """
        self.now = (action, micro_batch)

    def describe(self) -> str:
        """The last action in words: "forward of micro-batch 3"."""
        action, micro_batch = self.now
        return action if micro_batch is None else f"{action} of micro-batch {micro_batch}"


@dataclass(frozen=True)
class ProcessName:
    """A process, so that only a process on the same machine takes the pid for its own.

    `machine` is empty where the system does not tell enough to be sure; `started` tells a process
    from a later one with the same pid.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessName:
        """The name of this process."""
        return cls(_machine_name(), os.getpid(), _state_and_start(os.getpid())[1])

    def is_on(self, machine: str) -> bool:
        """The process ran on that machine, and so can be looked at by those who run there too."""
        return machine != "" and self.machine == machine

    def is_gone(self) -> bool:
        """The process, of this machine, has ended."""
        state, started = _state_and_start(self.pid)
        return started != self.started or state in "ZX"

    def can_act(self) -> bool:
        """The process, of this machine, is there and not stopped."""
        return not self.is_gone() and _state_and_start(self.pid)[0] != "T"

    def kill(self) -> None:
        """Kill the process if it is another one of this machine and still there."""
        is_there = self.is_on(_machine_name()) and _state_and_start(self.pid)[1] == self.started
        if is_there and self.pid != os.getpid():
            with contextlib.suppress(OSError):  # it has just ended, or is not ours to end
                os.kill(self.pid, signal.SIGKILL)


def _machine_name() -> str:
    """Host, boot and process namespace, or nothing where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """State letter of a process, and its start in clock ticks since boot; empty if there is none."""
    try:
        # Fields 3 and 22; the second is a name in parentheses that may hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        return "", ""


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank.

    Attributes:
        rank: whose it is.
        count: grows with every beat; -1 for a rank that has not started its monitor yet.
        stage: the rank's stage.
        action: its last action.
        micro_batch: the micro-batch of that action.
        action_seconds: how long the action has lasted.
        process: the rank's process.
    """

    rank: int
    count: int = -1
    stage: int | None = None
    action: str = "start"
    micro_batch: int | None = None
    action_seconds: float = math.inf
    process: ProcessName = ProcessName("", 0, "")

    def encode(self) -> str:
        """The beat as the text that lies in the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, rank: int, text: str) -> Beat:
        """Read what encode() wrote; nothing at all is a rank that has not started."""
        if not text:
            return cls(rank)
        fields = json.loads(text)
        return cls(**fields | {"process": ProcessName(**fields["process"])})


class Watch:
    """The time that a thread has really watched, by its own clock.

    A watcher that did not run itself (a loaded machine, a suspended laptop, Ctrl-Z) has no right to
    call others silent: no lap counts for more than `longest_lap_seconds`.
    """

    def __init__(self, longest_lap_seconds: float) -> None:
        self._longest_lap_seconds = longest_lap_seconds
        self._last: float | None = None

    def lap(self, now: float) -> float:
        """Seconds that count since the last lap, given the monotonic time."""
        last = now if self._last is None else self._last
        self._last = now
        return min(now - last, self._longest_lap_seconds)


class Pulses:
    """How long each rank has been silent, in seconds that its watcher has watched."""

    def __init__(self) -> None:
        self._beats: dict[int, Beat] = {}
        self._silence_seconds: dict[int, float] = {}

    def pass_time(self, seconds: float) -> None:
        """Let all ranks be silent for so long, until they are seen."""
        for rank in self._silence_seconds:
            self._silence_seconds[rank] += seconds

    def see(self, beat: Beat) -> None:
        """Take in the beat that lies in the store for a rank."""
        last = self._beats.get(beat.rank)
        if last is None or last.count != beat.count:
            self._silence_seconds[beat.rank] = 0.0
        self._beats[beat.rank] = beat

    def last(self, rank: int) -> Beat:
        """The last beat seen of a rank."""
        return self._beats.get(rank, Beat(rank))

    def gone(self, machine: str) -> Beat | None:
        """A rank whose process has ended, if it ran on the given machine: this one."""
        processes = ((beat, beat.process) for beat in self._beats.values())
        return next((b for b, p in processes if p.is_on(machine) and p.is_gone()), None)

    def silent(self, limit_seconds: float, *, also_unstarted: bool) -> tuple[Beat, float] | None:
        """The rank that has been silent for longest, if for over the limit, and for how long.

        Ranks that never started are named only on request, and last.
        """
        candidates = [
            (beat.count >= 0, seconds, -rank)
            for rank, beat in self._beats.items()
            if (seconds := self._silence_seconds[rank]) >= limit_seconds
            and (also_unstarted or beat.count >= 0)
        ]
        if not candidates:
            return None
        _, seconds, negative_rank = max(candidates)
        return self._beats[-negative_rank], seconds
