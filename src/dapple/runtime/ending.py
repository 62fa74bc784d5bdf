"""Ending a process at once, from any thread, whatever its main thread is stuck in."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import FrameType


class TerminationPipe:
    """Tells a thread that SIGTERM came, also while the main thread is inside a C++ wait.

    Python runs a signal handler in the main thread, between two bytecodes: never, while that thread
    waits for a message. But the interpreter's C handler also writes the signal's number to a file
    descriptor at once, and any thread can wait for that. (Blocking the signal and waiting for it in
    a thread would not do: threads that torch started before don't block it, so the signal would
    go to one of them and end the process; and children would inherit the blocked signal.)

    Must be made in the main thread.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._old_handler = signal.signal(signal.SIGTERM, _ignore)
        self._old_descriptor = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._read_end, select.POLLIN)
        # A forked child (a data loader's worker, say) has the same pipe: the end of a child must
        # not look like the end of this process.
        _open_pipes.append(self)
        forked = weakref.WeakMethod(self._forget_in_child)
        os.register_at_fork(after_in_child=lambda: (method := forked()) and method())

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for SIGTERM; True if it came."""
        if not self._poll.poll(timeout_seconds * 1000):
            return False
        return signal.SIGTERM in os.read(self._read_end, 4096)

    def wake(self) -> None:
        """End a wait() in another thread early."""
        os.write(self._write_end, b"\0")

    def close(self) -> None:
        """Give SIGTERM back to whoever had it. In the main thread, and when nobody waits."""
        place = _open_pipes.index(self)
        if self is _open_pipes[-1]:
            signal.set_wakeup_fd(self._old_descriptor)
            signal.signal(signal.SIGTERM, self._old_handler)
        else:
            # The next one, made while this was open, will give it back to whom we had it from.
            following = _open_pipes[place + 1]
            following._old_descriptor = self._old_descriptor
            following._old_handler = self._old_handler
        _open_pipes.remove(self)
        os.close(self._read_end)
        os.close(self._write_end)

    def _forget_in_child(self) -> None:
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_open_pipes: list[TerminationPipe] = []
"""In the order in which they were made; the last one gets the signals."""


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread that waits for the pipe acts."""


def print_line(text: str) -> None:
    """Print one line on standard error, whole, whatever other threads and ranks print."""
    start = "\n" if sys.stderr and sys.stderr.isatty() else ""  # below a progress bar
    _briefly(lambda: os.write(2, f"{start}dapple: {text}\n".encode()))


def print_main_stack(title: str) -> None:
    """Print where the main thread is, for a failure that no exception shows."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame else "(the main thread has ended)\n"
    _briefly(lambda: os.write(2, f"dapple: {title}\n{stack}".encode()))


def print_traceback(title: str, error: BaseException) -> None:
    """Print an exception with its traceback."""
    text = "".join(traceback.format_exception(error))
    _briefly(lambda: os.write(2, f"dapple: {title}\n{text}".encode()))


def end_process(exit_code: int) -> None:
    """End this process now, with what it printed, and without any tear-down that may hang."""
    _briefly(lambda: [stream.flush() for stream in (sys.stdout, sys.stderr) if stream])
    os._exit(exit_code)


def _briefly(action: Callable[[], object]) -> None:
    """Call something that a full pipe or a lock held by a stuck thread may block, for 1 s at most."""
    thread = threading.Thread(target=action, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        action()
    else:
        thread.join(1.0)
