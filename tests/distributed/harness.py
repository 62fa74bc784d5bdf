"""Run a function on several ranks that talk over gloo, and say what each did when one fails.

    results = run_ranks(3, check_routing, plan, timeout_seconds=60)     # in the test
    def check_routing(rank, world_size, plan): ...                      # at module level

A process takes seconds to import torch, so one does it and forks the ranks, after what `prepare` has
made for all of them, such as captured models. Even so, run many cases inside the function. Say what a
rank does with note_action(), or hand the rank's Progress to watch(). The function finds the default process group initialised, and RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT set as torchrun sets them. Like torchrun, the parent hosts the store:
no port can be taken by another process in between, and the store outlives every rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapple.runtime.heartbeat import Progress

# Once a rank has failed, the others get this long to end with errors of their own.
_AFTERMATH_SECONDS = 3.0
# To import torch, prepare and meet the others, on a machine with every core busy.
_START_SECONDS = 120.0
_PARENT_OF_RANKS = "from tests.distributed.harness import _fork_ranks; _fork_ranks()"


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message has every rank's last action and traceback."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 60.0,
    prepare: Callable[..., Any] | None = None,
) -> list[Any]:
    """Call function(rank, world_size, *args) on every rank, and return the results by rank.

    Args:
        world_size: number of processes.
        function: a function at the top level of an importable module.
        args: picklable arguments, the same for every rank.
        timeout_seconds: from when all ranks have started; then all are killed.
        prepare: called with the same args before the ranks are forked, at the top level as well.

    Raises:
        RanksFailed: a rank raised, died or hung.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="dapple-ranks-") as folder:
        call = (function, args, timeout_seconds, prepare)
        Path(folder, "call").write_bytes(pickle.dumps(call))
        ranks = [_Rank(rank, Path(folder)) for rank in range(world_size)]
        with _parent_of_ranks(world_size, folder, store.port) as parent:
            reason = _wait(parent, ranks, timeout_seconds)
            if reason:
                raise RanksFailed(f"{reason}\n" + "\n".join(rank.story() for rank in ranks))
            return [rank.result() for rank in ranks]


def note_action(action: str) -> None:
    """Say, on a rank, what it does now; shown when the run fails."""
    _write(f"action-{os.environ['RANK']}", action.encode())


def watch(progress: Progress) -> None:
    """Have, on a rank, the last action of a progress shown when the run fails, in place of notes."""
    threading.Thread(target=_copy_actions, args=(progress,), daemon=True).start()


@contextlib.contextmanager
def _parent_of_ranks(world_size: int, folder: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process that forks the ranks; it and all of them are gone in the end."""
    environment = os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "DAPPLE_TEST_FOLDER": folder,
    }
    with Path(folder, "output-parent").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _PARENT_OF_RANKS],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()


@dataclass
class _Rank:
    rank: int
    folder: Path

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        text = self._text("exit")
        return int(text) if text else None

    def result(self) -> Any:
        return pickle.loads((self.folder / f"result-{self.rank}").read_bytes())

    def has_started(self) -> bool:
        return (self.folder / f"started-{self.rank}").exists()

    def raised_at(self) -> float:
        """When it raised; 0 if it died without, which others then raised because of."""
        return float(self._text("raised") or 0)

    def story(self) -> str:
        """How the rank ended, its last action, and what it printed (with its tracebacks)."""
        code = self.code
        ended = "was still running" if code is None else f"ended with exit code {code}"
        action = self._text("action") or "none noted"
        return f"-- rank {self.rank} {ended}; last action: {action}\n{self._text('output')}"

    def _text(self, name: str) -> str:
        path = self.folder / f"{name}-{self.rank}"
        return path.read_text(errors="replace").rstrip() if path.exists() else ""

    def dump_traceback(self) -> None:
        """Have it print where each of its threads is, also from inside a C++ wait."""
        if (pid := self._text("pid")) and self.code is None:
            os.kill(int(pid), signal.SIGUSR1)


def _wait(parent: subprocess.Popen[bytes], ranks: list[_Rank], timeout_seconds: float) -> str:
    """Wait for all ranks; the reason if not all of them ended well, else an empty string."""
    reason = ""
    limit_seconds, all_started = _START_SECONDS, False
    start = time.monotonic()
    while any(rank.code is None for rank in ranks):
        if parent.poll():
            return f"no rank was forked: {(ranks[0].folder / 'output-parent').read_text()}"
        if not all_started and all(rank.has_started() for rank in ranks):
            start, limit_seconds, all_started = time.monotonic(), timeout_seconds, True
        if not reason and (reason := _first_failure(ranks)):
            start, limit_seconds = time.monotonic(), _AFTERMATH_SECONDS
        if time.monotonic() - start > limit_seconds:
            for rank in ranks:
                rank.dump_traceback()
            time.sleep(0.5)
            return reason or f"not {'done' if all_started else 'started'} after {limit_seconds:g} s"
        time.sleep(0.02)
    return reason or _first_failure(ranks)


def _first_failure(ranks: list[_Rank]) -> str:
    failed = [rank for rank in ranks if rank.code]
    return f"rank {min(failed, key=_Rank.raised_at).rank} failed" if failed else ""


def _fork_ranks() -> None:
    """What the parent of the ranks does: import and prepare, fork, and note how each ended."""
    folder = Path(os.environ["DAPPLE_TEST_FOLDER"])
    torch.set_num_threads(1)
    _, args, _, prepare = pickle.loads((folder / "call").read_bytes())
    if prepare is not None:
        prepare(*args)
    rank_of = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _work()
        rank_of[pid] = rank
        _write(f"pid-{rank}", str(pid).encode())
    while rank_of:
        pid, status = os.wait()
        _write(f"exit-{rank_of.pop(pid)}", str(os.waitstatus_to_exitcode(status)).encode())


def _work() -> None:
    """What the process of a rank does."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["DAPPLE_TEST_FOLDER"])
    function, args, timeout_seconds, _ = pickle.loads((folder / "call").read_bytes())
    code = 0
    try:
        # The parent's limit ends a hang; gloo's own must not come first and hide where it was.
        dist.init_process_group("gloo", timeout=timedelta(seconds=2 * timeout_seconds))
        _write(f"started-{rank}", b"")
        result = pickle.dumps(function(rank, world_size, *args))
        _write(f"result-{rank}", result)
        dist.barrier()  # a rank that leaves early closes connections that others still use
    except BaseException:
        _write(f"raised-{rank}", str(time.time()).encode())
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no tear-down, whose order and noise are not what is tested


def _copy_actions(progress: Progress) -> None:
    while True:
        note_action(progress.describe())
        time.sleep(0.1)


def _write(name: str, content: bytes) -> None:
    """Write a file of this run whole: the parent may read it, or kill this process, at any time."""
    path = Path(os.environ["DAPPLE_TEST_FOLDER"], name)
    temporary = path.with_suffix(f".{threading.get_ident()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _end_with_parent() -> None:
    """End this process when the parent's end of its standard input closes."""
    sys.stdin.buffer.read()
    os._exit(1)
