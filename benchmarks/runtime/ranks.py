"""Starting a benchmark's ranks, on this machine's loopback or over slow links of its own.

Both sides of a comparison run in the same processes, in turn, so that a noisy machine slows both.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Step = Callable[[], object]
_PREFIX = "dpl"


def under_way() -> bool:
    """This process is a rank of a benchmark."""
    return "DAPPLE_BENCHMARK" in os.environ


def run_ranks(module: str, ranks: int, arguments: Sequence[str], rate: str | None = None) -> Any:
    """Run `python -m module arguments` as so many ranks; what rank 0 handed to `answer`.

    Args:
        module: a module of this folder that looks at `under_way()`.
        ranks: how many.
        arguments: for each.
        rate: of every rank's own link both ways, such as "50mbit" (Linux, as root); None: loopback.
    """
    with _network(ranks, rate) as places:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = []
        for rank, (prefix, extra) in enumerate(places):
            environment = {
                **os.environ,
                **extra,
                "DAPPLE_BENCHMARK": "1",
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_PORT": str(port),
            }
            command = [*prefix, sys.executable, "-m", module, *arguments]
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            started.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
        text, _ = started[0].communicate()
        codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"a rank of {module} failed: exit codes {codes}")
    return json.loads(text.splitlines()[-1])


def answer(value: object) -> None:
    """Hand a result to the process that started the ranks; called on rank 0."""
    print(json.dumps(value), flush=True)


def timed_in_turn(sides: dict[str, Step], rounds: int, sync: Step) -> dict[str, list[float]]:
    """Seconds of every side, `rounds` times each, in turn; the order changes from round to round.

    Args:
        sides: what to time, by name. Each is called once before, to warm up.
        rounds: how often.
        sync: waits for all ranks; called before and after each timing, so that the time is that of
            the last rank.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        step()
    names = list(sides)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            sync()
            begin = time.perf_counter()
            sides[name]()
            sync()
            found[name].append(time.perf_counter() - begin)
    return found


def ratio(found: dict[str, list[float]], other: str, ours: str) -> float:
    """The median over rounds of other / ours: above 1, ours takes less time."""
    return statistics.median(a / b for a, b in zip(found[other], found[ours], strict=True))


@contextlib.contextmanager
def _network(ranks: int, rate: str | None) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """How to start each rank: words before its command, and its environment."""
    if rate is None:
        loopback = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        yield [([], loopback)] * ranks
        return
    if os.geteuid() != 0:
        raise SystemExit("slow links are network namespaces, which only root can make")
    names = [f"{_PREFIX}{rank}" for rank in range(ranks)]
    _remove([*names, f"{_PREFIX}sw"])
    try:
        _make(names, f"{_PREFIX}sw", rate)
        environment = {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        yield [(["ip", "netns", "exec", name], environment) for name in names]
    finally:
        _remove([*names, f"{_PREFIX}sw"])


def _make(names: Sequence[str], switch: str, rate: str) -> None:
    """A namespace per rank, joined by a switch; each link holds both directions to the rate."""
    limit = ["root", "tbf", "rate", rate, "burst", "128kb", "limit", "4mb"]
    _call("ip", "netns", "add", switch)
    _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
    _call("ip", "-n", switch, "link", "set", "br0", "up")
    for number, name in enumerate(names):
        port = f"p{number}"
        _call("ip", "netns", "add", name)
        _call("ip", "-n", name, "link", "set", "lo", "up")
        ends = ["type", "veth", "peer", "name", "eth0", "netns", name]
        _call("ip", "link", "add", "name", port, "netns", switch, *ends)
        _call("ip", "-n", switch, "link", "set", port, "master", "br0")
        _call("ip", "-n", switch, "link", "set", port, "up")
        _call("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
        _call("ip", "-n", name, "link", "set", "eth0", "up")
        _call("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
        _call("tc", "-n", switch, "qdisc", "add", "dev", port, *limit)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _call(*words: str) -> None:
    subprocess.run(words, check=True)
