"""A run of three ranks that pass numbers around a ring, and go wrong as told: one rank of it.

    torchrun --standalone --nproc-per-node 3 failing_run.py kill 1      # the launcher's store
    python failing_run.py kill 1 --fork 3                               # rank 0 hosts the store

Arguments: what goes wrong, and on which rank. Every rank prints its pid, and the one that goes wrong
the time just before, in seconds since the epoch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dapple.errors import RankFailure
from dapple.runtime.failure import Monitor, Patience, Progress

FAULTY_MICRO_BATCH = 20
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


def main(fault: str, faulty_rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    rank = dist.get_rank()
    fault_here = fault if rank == faulty_rank else "nothing"
    progress = Progress(rank, stage=rank)
    patience = Patience(stall_seconds=3.0) if fault == "stall" else None
    monitor = Monitor.from_environment(progress, patience)
    print(f"pid {os.getpid()}", flush=True)
    dist.barrier()
    try:
        with monitor.guard():
            for micro_batch in range(FAULTY_MICRO_BATCH + 5):
                at_fault = micro_batch == FAULTY_MICRO_BATCH
                _one_round(progress, micro_batch, fault_here if at_fault else "nothing")
    except RankFailure:
        if fault != "raise and sleep":
            sys.exit(1)
        time.sleep(60)
    progress.set("checkpoint")
    if fault == "close early" and rank != faulty_rank:
        progress.set("barrier")
        dist.barrier()
    if fault_here == "close early":
        print(f"wrong at {time.time()}", flush=True)
    _go_wrong_after(fault_here)
    monitor.close()
    print("clean end", flush=True)
    dist.destroy_process_group()


def _one_round(progress: Progress, micro_batch: int, fault: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    progress.set("forward", micro_batch)
    time.sleep(0.02)
    _go_wrong(fault)
    progress.set("send", micro_batch)
    send = dist.isend(torch.ones(1000), (rank + 1) % world_size)
    progress.set("receive", micro_batch)
    dist.recv(torch.zeros(1000), (rank - 1) % world_size)
    assert send is not None
    send.wait()


def _go_wrong(fault: str) -> None:
    if fault in ("nothing", "close early") or fault.endswith("after"):
        return
    print(f"wrong at {time.time()}", flush=True)
    if fault.startswith("raise"):
        raise ValueError("boom\nin two lines")
    if fault == "exit":
        sys.exit(3)
    if fault in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault])
    if fault == "kill launcher":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def _go_wrong_after(fault: str) -> None:
    if fault == "raise after":
        _go_wrong("raise")
    if fault == "close 7 s after":
        time.sleep(7)


def _fork(fault: str, faulty_rank: int, world_size: int) -> None:
    """Launch without torchrun, as multiprocessing does: nobody tells the ranks of each other's end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["WORLD_SIZE"] = str(world_size)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(rank, fault, faulty_rank)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("exit codes", *(process.exitcode for process in processes), flush=True)
    sys.exit(any(process.exitcode for process in processes))


def _rank(rank: int, fault: str, faulty_rank: int) -> None:
    os.environ["RANK"] = str(rank)
    main(fault, faulty_rank)


if __name__ == "__main__":
    if sys.argv[3:]:
        _fork(sys.argv[1], int(sys.argv[2]), int(sys.argv[4]))
    else:
        main(sys.argv[1], int(sys.argv[2]))
