"""Failure: a step completes on all ranks, or every rank ends within 10 s and says why.

    progress = Progress(rank, stage)
    monitor = Monitor.from_environment(progress)    # in the main thread
    for batch in batches:
        with monitor.guard():
            ...                                     # progress.set("forward", 3), ...
    monitor.close()                                 # returns when every rank has come here

Two threads per rank do it, because the main thread may sit in a wait for a message that never comes:

    heart     owns a client of the store: puts up this rank's heartbeat, reads the notice of a failure
              and the heartbeats of others, decides, reports, ends the process
    watchdog  waits for SIGTERM, and sees to it that the heart itself does not hang

docs/failure.md tells what is detected, how fast, and what it cannot see.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from dapple.errors import InputError, RankFailure, RunError, one_line
from dapple.runtime.causes import tells_of_a_lost_peer
from dapple.runtime.ending import (
    TerminationPipe,
    end_process,
    print_line,
    print_main_stack,
    print_traceback,
)
from dapple.runtime.heartbeat import (
    Beat,
    ProcessName,
    Progress,
    Pulses,
    Watch,
)
from dapple.runtime.judge import Judge, ranks_to_watch
from dapple.runtime.noticeboard import Notice, NoticeBoard
from dapple.runtime.patience import Patience

__all__ = ["Monitor", "Patience", "Progress"]


class Monitor:
    """Watches over the ranks of one run; every rank makes one, in its main thread.

    Args:
        progress: what this rank does.
        store_host, store_port: a torch TCPStore that all ranks reach.
        world_size: number of ranks.
        store_rank: the rank whose process hosts the store, None if the launcher does.
        attempt: which restart of the job this is.
        patience: the time limits, the same on every rank.

    Raises:
        RunError: the store cannot be reached.
        ValueError: not in the main thread, where alone Python takes signals.
    """

    def __init__(
        self,
        progress: Progress,
        store_host: str,
        store_port: int,
        world_size: int,
        *,
        store_rank: int | None = None,
        attempt: str = "0",
        patience: Patience | None = None,
    ) -> None:
        self._progress = progress
        self._rank = progress.rank
        self._world_size = world_size
        self._store = f"{store_host}:{store_port}"
        self._store_rank = store_rank
        self._patience = patience or Patience()
        self._process = ProcessName.own()
        self._pulses = Pulses()
        self._beat_watch, self._look_watch = self._new_watch(), self._new_watch()
        self._watched = ranks_to_watch(self._rank, world_size)
        self._beats = 0
        self._next_look = 0.0
        self._seen_action = progress.now
        self._action_seconds = 0.0
        self._search_left_seconds = 0.0  # looking for a cause while positive
        self._own: Notice | None = None  # guard() waits for the verdict on it
        self._own_is_doubtful = False
        self._notice: Notice | None = None  # the verdict
        self._settled = threading.Event()  # the verdict is out, reported, and read by the others
        self._closing = False
        self._has_closed = False
        self._over = threading.Event()  # the heart has ended
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._reported = threading.Lock()  # taken by the first thread that reports, never freed

        self._board = NoticeBoard(store_host, store_port, self._rank, attempt)
        self._judge = Judge(
            self._board, self._pulses, self._process, self._rank, world_size, self._patience
        )
        self._board.write_beat(self._beat())
        self._pipe = TerminationPipe()
        atexit.register(self._at_exit)
        self._threads = [
            threading.Thread(target=self._heart, name="dapple-heart", daemon=True),
            threading.Thread(target=self._watchdog, name="dapple-watchdog", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def from_environment(
        cls, progress: Progress, patience: Patience | None = None, run: int = 0
    ) -> Monitor:
        """The monitor of a process that torchrun, or any launcher with env:// variables, started.

        Args:
            progress: where this rank notes what it does.
            patience: how long things may take.
            run: tells apart monitors that one process has one after the other.

        Raises:
            RunError: no such launcher started this process, or the store cannot be reached.
        """
        missing = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"} - set(os.environ)
        if missing:
            raise RunError(
                f"{', '.join(sorted(missing))} is not set, so the other ranks cannot be found; "
                "start the run with torchrun"
            )
        launcher_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            progress,
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            int(os.environ["WORLD_SIZE"]),
            store_rank=None if launcher_hosts_store else 0,
            attempt=f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{run}",
            patience=patience,
        )

    # -- for the main thread

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around a step: an exception ends the run on every rank, with its cause.

        The rank that raised prints the traceback, every rank prints the line; what is raised needs
        no more printing. A process that goes on regardless is ended after `grace_seconds`.

        Raises:
            RankFailure: the failure that ends the run. That is the exception of this rank, or,
                if this rank merely lost a connection, the failure of the rank that broke it.
        """
        try:
            yield
        except RankFailure:
            raise
        except BaseException as error:
            # A user's mistake is told in its one line, Ctrl-C is shown by Python.
            needs_traceback = isinstance(error, Exception) and not isinstance(error, InputError)
            notice = self._settle(error, printed=not needs_traceback)
            if not isinstance(error, Exception):
                raise  # Ctrl-C and sys.exit() stay what they are
            raise notice.failure() from None  # its traceback has been printed

    def close(self) -> None:
        """End the watch. Returns when every rank has called it, or at once after a failure.

        So a failure of any rank before its close() still ends every rank with an error.
        """
        self._progress.set("close")
        self._closing = True
        self._wake.set()
        self._over.wait()
        self._stop()

    def _settle(self, error: BaseException, *, printed: bool = False) -> Notice:
        """Have the heart find out, put up and report why the run ends; returns the verdict."""
        own = self._judge.notice(self._beat(), one_line(error))
        if self._over.is_set() or not self._is_own_process():
            return self._notice or own
        doubtful = tells_of_a_lost_peer(error)
        if not doubtful and not printed:
            print_traceback(f"the exception of rank {self._rank}", error)
        self._own_is_doubtful = doubtful
        self._own = own
        if doubtful:
            self._search()
        self._wake.set()
        self._settled.wait()
        notice = self._notice or own
        if doubtful and not printed and notice == own:
            print_traceback(f"the exception of rank {self._rank}", error)
        return notice

    def _search(self) -> None:
        """Have the heart look, at once and at everybody, for what is behind SIGTERM or an error."""
        if self._search_left_seconds <= 0:
            self._search_left_seconds = self._patience.search_seconds
        self._next_look = 0.0
        self._wake.set()

    def _at_exit(self) -> None:
        """At the end of a process that did not close: an uncaught exception ends the run too.

        Also ends the threads, which the interpreter would otherwise cut off inside of the store.
        """
        if not self._is_own_process():
            return
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is not None and self._notice is None:
            self._settle(error, printed=True)
        self._stop()

    def _is_own_process(self) -> bool:
        """False in a fork of this process, which has the monitor's data but not its threads."""
        return os.getpid() == self._process.pid

    def _stop(self) -> None:
        atexit.unregister(self._at_exit)
        self._over.set()
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._wake.set()
        self._pipe.wake()
        for thread in self._threads:
            thread.join(2.0)
        self._pipe.close()

    # -- the heart's thread

    def _heart(self) -> None:
        """Beat, look, and decide, until the run fails or every rank has called close()."""
        try:
            while not self._over.is_set():
                if self._closing and self._all_have_closed():
                    self._leave_in_order()
                    break
                self._beat_once()
                if notice := self._board.notice() or self._own_notice() or self._look():
                    self._end(notice)
                    break
                self._wake.wait(self._patience.beat_seconds)
                self._wake.clear()
        except Exception as error:  # whatever it is, without a heart nobody watches
            self._lose_store(f"failed ({one_line(error)})")
        self._over.set()

    def _beat_once(self) -> None:
        elapsed = self._beat_watch.lap(time.monotonic())
        now = self._progress.now
        self._action_seconds = self._action_seconds + elapsed if now is self._seen_action else 0.0
        self._seen_action = now
        self._beats += 1
        self._board.write_beat(self._beat())
        if self._store_rank not in (None, self._rank):
            # Its last action can't be asked for when it is gone, and the store with it.
            self._pulses.see(self._board.read_beat(self._store_rank))

    def _own_notice(self) -> Notice | None:
        """The failure of this rank, unless another rank may be behind it."""
        return self._board.post(self._own) if self._own and not self._own_is_doubtful else None

    def _look(self) -> Notice | None:
        """Look at the others now and then, and judge."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + self._patience.look_seconds
        elapsed = self._look_watch.lap(now)
        self._pulses.pass_time(elapsed)
        searching = self._search_left_seconds > 0
        for rank in range(self._world_size) if searching else self._watched:
            if rank != self._rank:
                self._pulses.see(self._board.read_beat(rank))
        found = self._judge.find(self._beat(), searching)
        if found is None and searching:
            self._search_left_seconds -= elapsed
            if self._search_left_seconds <= 0:
                found = self._own or self._termination()
        # Once all have closed, the ranks that are gone have merely been faster.
        if found is None or (self._closing and self._all_have_closed()):
            return None
        return self._board.post(found)

    def _beat(self) -> Beat:
        action, micro_batch = self._progress.now
        stage = self._progress.stage
        seconds = self._action_seconds
        return Beat(self._rank, self._beats, stage, action, micro_batch, seconds, self._process)

    def _new_watch(self) -> Watch:
        return Watch(2 * self._patience.look_seconds)

    def _termination(self) -> Notice:
        return self._judge.notice(
            self._beat(), "SIGTERM: this process was told to end, and no rank had failed before"
        )

    def _all_have_closed(self) -> bool:
        increase = 0 if self._has_closed else 1
        self._has_closed = True
        return self._board.count("closed", increase) >= self._world_size

    def _leave_in_order(self) -> None:
        """Leave a run that went well: the host of the store goes last."""
        self._board.count("left", 1)
        if self._rank == self._store_rank:
            self._wait_for("left", self._world_size)

    def _end(self, notice: Notice) -> None:
        """Report the failure of the run, and end this process, or let guard() raise in it."""
        self._notice = notice
        if notice.rank == self._rank and self._own is None:
            print_main_stack(f"where rank {self._rank} is")
        self._report(notice)
        with contextlib.suppress(RuntimeError, OSError):  # the store may go before this rank
            self._board.count("ended", 1)
            self._see_off(notice)
        if self._own is None:
            end_process(1)
        self._settled.set()  # from here on the watchdog counts down

    def _see_off(self, notice: Notice) -> None:
        """Stay until the others know, if they depend on this rank; end a failed process that can't.

        A stopped process does not act on SIGTERM, and a launcher waits long before it kills.
        """
        failed = self._board.read_beat(notice.rank).process
        was_silent = notice.author != notice.rank
        is_neighbour = was_silent and failed.is_on(self._process.machine)
        knows = not is_neighbour or failed.can_act()  # or will never, and need not be waited for
        if is_neighbour or self._rank in (notice.author, self._store_rank):
            all_know = self._wait_for("ended", self._world_size - (0 if knows else 1))
            if is_neighbour and not (knows and all_know):
                failed.kill()

    def _wait_for(self, event: str, num_ranks: int) -> bool:
        deadline = time.monotonic() + self._patience.linger_seconds
        while self._board.count(event) < num_ranks:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        if self._rank == self._store_rank:
            time.sleep(0.2)  # those who wait have to be told as well
        return True

    def _report(self, notice: Notice) -> None:
        """Print the one line of this rank, once, whichever thread comes first."""
        if self._reported.acquire(blocking=False):
            print_line(f"{notice.failure()}; {self._signature()}")

    def _signature(self) -> str:
        stage = "" if self._progress.stage is None else f" (stage {self._progress.stage})"
        return f"this is rank {self._rank}{stage}, last action: {self._progress.describe()}"

    # -- the watchdog's thread

    def _watchdog(self) -> None:
        patience = self._patience
        heart, watch = Pulses(), self._new_watch()
        left_seconds = patience.linger_seconds + patience.grace_seconds
        while not self._stopped.is_set():
            if self._pipe.wait(patience.look_seconds):
                self._search()
                left_seconds = min(left_seconds, patience.linger_seconds)
            elapsed = watch.lap(time.monotonic())
            heart.pass_time(elapsed)
            heart.see(Beat(self._rank, self._beats))
            if self._notice is not None:
                left_seconds -= elapsed
                if left_seconds <= 0:
                    end_process(1)
            elif heart.silent(patience.stale_seconds, also_unstarted=False):
                self._lose_store(f"has not answered for {patience.stale_seconds:g} s")

    def _lose_store(self, what: str) -> None:
        """End this process: without the store nobody can be asked. From either thread."""
        if self._notice is not None or self._over.is_set():
            return
        if self._own and not self._own_is_doubtful:
            self._report(self._own)
        elif self._store_rank not in (None, self._rank):
            host = self._pulses.last(self._store_rank)
            self._report(
                self._judge.notice(host, f"the store that it hosts at {self._store} {what}")
            )
            host.process.kill()  # it may be stopped, and nothing else would end it
        elif self._reported.acquire(blocking=False):
            print_line(
                f"the run ends: the store at {self._store} {what}, so its host (the launcher of "
                f"this run, or its machine) is gone or unreachable; {self._signature()}"
            )
        end_process(1)
