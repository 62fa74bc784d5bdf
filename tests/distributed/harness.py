"""Run a function on several ranks that talk over gloo, and say what each did when one fails.

    results = run_ranks(3, check_routing, plan, timeout_seconds=60)     # in the test
    def check_routing(rank, world_size, plan): ...                      # at module level

A process takes seconds to import torch: spawn once per world size, and run many cases inside the
function. It finds the default process group initialised, and RANK, WORLD_SIZE, LOCAL_RANK,
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Once a rank has failed, the others get this long to end with errors of their own.
_AFTERMATH_SECONDS = 3.0
_WORKER = "from tests.distributed.harness import _work; _work()"


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
        timeout_seconds: all ranks are killed after it, and RanksFailed is raised.

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
    Path(os.environ["DAPPLE_TEST_FOLDER"], f"action-{os.environ['RANK']}").write_text(action)


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


def _wait(ranks: Iterable[_Rank], timeout_seconds: float) -> str:
    """Wait for all ranks; the reason if not all of them ended well, else an empty string."""
    reason = ""
    deadline = time.monotonic() + timeout_seconds
    while running := [rank for rank in ranks if rank.process.poll() is None]:
        failed = [rank.rank for rank in ranks if rank.process.returncode]
        if failed and not reason:
            reason = f"rank {failed[0]} failed"
            deadline = min(deadline, time.monotonic() + _AFTERMATH_SECONDS)
        if time.monotonic() > deadline:
            _dump_tracebacks(running)
            return reason or f"not done after {timeout_seconds:g} s"
        time.sleep(0.02)
    failed = [rank.rank for rank in ranks if rank.process.returncode]
    return reason or (f"rank {failed[0]} failed" if failed else "")


def _dump_tracebacks(running: list[_Rank]) -> None:
    """Have the ranks print where each of their threads is, also from inside a C++ wait."""
    for rank in running:
        rank.process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)


def _work() -> None:
    """What the process of a rank does."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["DAPPLE_TEST_FOLDER"])
    function, args, timeout_seconds = pickle.loads((folder / "call").read_bytes())
    code = 0
    try:
        # The parent's limit ends a hang; gloo's own must not come first and hide where it was.
        dist.init_process_group("gloo", timeout=timedelta(seconds=2 * timeout_seconds))
        result = pickle.dumps(function(rank, world_size, *args))
        (folder / f"result-{rank}").write_bytes(result)
        dist.barrier()  # a rank that leaves early closes connections that others still use
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no tear-down, whose order and noise are not what is tested


def _end_with_parent() -> None:
    """End this process when the parent's end of its standard input closes."""
    sys.stdin.buffer.read()
    os._exit(1)
