"""The links between the processes of this machine, measured over `torch.distributed`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dapple.cluster import Link

_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
_ROUNDS = 15


def measure_link(device: torch.device | None = None) -> Link:
    """Latency, bandwidth and AllReduce bandwidth between the ranks; all ranks call it.

    Ranks 0 and 1 play ping-pong with several sizes, and a straight line through the medians gives
    latency and bandwidth. All ranks then sum a buffer; its time gives the bandwidth of the ring
    formula 2 (n-1)/n bytes / bandwidth.
    """
    where = device or torch.device("cpu")
    times = []
    for size in _SIZES:
        message = torch.zeros(size, dtype=torch.uint8, device=where)
        # There and back, so half of it is one way.
        times.append(_median(_ping_pong(message)) / 2)
    latency, seconds_per_byte = _line(list(_SIZES), times)
    size = _SIZES[-1]
    buffer = torch.zeros(size // 4, device=where)
    seconds = _median(lambda: dist.all_reduce(buffer))
    world = dist.get_world_size()
    figures = torch.tensor(
        [latency, 1 / seconds_per_byte, 2 * (world - 1) / world * size / seconds],
        dtype=torch.float64,
        device=where,
    )
    dist.broadcast(figures, src=0)
    latency, bandwidth, allreduce = figures.tolist()
    return Link(bandwidth=bandwidth, latency=latency, allreduce_bandwidth=allreduce)


def _ping_pong(buffer: torch.Tensor) -> Callable[[], None]:
    """There and back between ranks 0 and 1."""
    rank = dist.get_rank()

    def turn() -> None:
        if rank == 0:
            dist.send(buffer, dst=1)
            dist.recv(buffer, src=1)
        elif rank == 1:
            dist.recv(buffer, src=0)
            dist.send(buffer, dst=0)

    return turn


def _median(action: Callable[[], object]) -> float:
    action()
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _line(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """(at size zero, per byte) of the least-squares line, both kept positive."""
    mean_x, mean_y = statistics.mean(sizes), statistics.mean(seconds)
    spread = sum((x - mean_x) ** 2 for x in sizes)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(sizes, seconds, strict=True)) / spread
    slope = max(slope, 1e-13)
    return max(mean_y - slope * mean_x, 1e-6), slope
