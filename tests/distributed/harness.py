"""Run a function on several ranks that talk over gloo, and say what each did when one fails.

    results = run_ranks(3, check_routing, plan, timeout_seconds=60)     # in the test
    def check_routing(rank, world_size, plan): ...                      # at module level

A process takes seconds to import torch: spawn once per world size, and run many cases inside the
function. Say what a rank does with note_action(), or hand the rank's Progress to watch(). The
function finds the default process group initialised, and RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT set as torchrun sets them. Like torchrun, the parent hosts the store:
no port can be taken by another process in between, and the store outlives every rank.
"""

from __future__ import annotations

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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapple.runtime.heartbeat import Progress

# Once a rank has failed, the others get this long to end with errors of their own.
_AFTERMATH_SECONDS = 3.0
# To start a process: import torch and meet the others, on a machine with every core busy.
_START_SECONDS = 90.0
# The handler comes first: a signal must not end a process that still imports.
_WORKER = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, all_threads=True)
from tests.distributed.harness import _work
_work()
"""


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message has every rank's last action and traceback."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 60.0,
) -> list[Any]:
    """Call function(rank, world_size, *args) on every rank, and return the results by rank.

    Args:
        world_size: number of processes.
        function: a function at the top level of an importable module.
        args: picklable arguments, the same for every rank.
        timeout_seconds: from when all ranks have started; then all are killed.

    Raises:
        RanksFailed: a rank raised, died or hung.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="dapple-ranks-") as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, args, timeout_seconds)))
        ranks = [_Rank.start(rank, world_size, folder, store.port) for rank in range(world_size)]
        try:
            reason = _wait(ranks, timeout_seconds)
            if reason:
                raise RanksFailed(f"{reason}\n" + "\n".join(rank.story() for rank in ranks))
            return [rank.result() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()


def note_action(action: str) -> None:
    """Say, on a rank, what it does now; shown when the run fails."""
    _write(f"action-{os.environ['RANK']}", action.encode())


def watch(progress: Progress) -> None:
    """Have, on a rank, the last action of a progress shown when the run fails, in place of notes."""
    threading.Thread(target=_copy_actions, args=(progress,), daemon=True).start()


@dataclass
class _Rank:
    rank: int
    folder: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, rank: int, world_size: int, folder: str, port: int) -> _Rank:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "DAPPLE_TEST_FOLDER": folder,
        }
        with Path(folder, f"output-{rank}").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", _WORKER],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return cls(rank, Path(folder), process)

    def result(self) -> Any:
        return pickle.loads((self.folder / f"result-{self.rank}").read_bytes())

    def has_started(self) -> bool:
        return (self.folder / f"started-{self.rank}").exists()

    def raised_at(self) -> float:
        """When it raised; 0 if it died without, which others then raised because of."""
        return float(self._text("raised") or 0)

    def story(self) -> str:
        """How the rank ended, its last action, and what it printed (with its tracebacks)."""
        code = self.process.poll()
        ended = "was still running" if code is None else f"ended with exit code {code}"
        action = self._text("action") or "none noted"
        return f"-- rank {self.rank} {ended}; last action: {action}\n{self._text('output')}"

    def _text(self, name: str) -> str:
        path = self.folder / f"{name}-{self.rank}"
        return path.read_text(errors="replace").rstrip() if path.exists() else ""

    def kill(self) -> None:
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


def _wait(ranks: list[_Rank], timeout_seconds: float) -> str:
    """Wait for all ranks; the reason if not all of them ended well, else an empty string."""
    reason = ""
    limit_seconds, all_started = _START_SECONDS, False
    start = time.monotonic()
    while running := [rank for rank in ranks if rank.process.poll() is None]:
        if not all_started and all(rank.has_started() for rank in ranks):
            start, limit_seconds, all_started = time.monotonic(), timeout_seconds, True
        if not reason and (reason := _first_failure(ranks)):
            start, limit_seconds = time.monotonic(), _AFTERMATH_SECONDS
        if time.monotonic() - start > limit_seconds:
            _dump_tracebacks(running)
            return reason or f"not {'done' if all_started else 'started'} after {limit_seconds:g} s"
        time.sleep(0.02)
    return reason or _first_failure(ranks)


def _first_failure(ranks: list[_Rank]) -> str:
    failed = [rank for rank in ranks if rank.process.returncode]
    return f"rank {min(failed, key=_Rank.raised_at).rank} failed" if failed else ""


def _dump_tracebacks(running: list[_Rank]) -> None:
    """Have the ranks print where each of their threads is, also from inside a C++ wait."""
    for rank in running:
        rank.process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)


def _work() -> None:
    """What the process of a rank does."""
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["DAPPLE_TEST_FOLDER"])
    function, args, timeout_seconds = pickle.loads((folder / "call").read_bytes())
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
