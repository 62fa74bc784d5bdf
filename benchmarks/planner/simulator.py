"""How long a simulation takes: 64 stages and 1024 micro-batches, 131,072 computations.

    python -m benchmarks.planner.simulator

Goal: 2 s. One device per stage, on eight machines of eight; with both network models, where stages are
equally long and where they are not, and under each schedule of one stage per device.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.planner.speed import model
from dapple.cluster import NETWORK_MODELS, preset
from dapple.costs import CostModel
from dapple.records import StagePlan
from dapple.schedule import warmup_counts
from dapple.simulator import step_seconds

_STAGES, _MICRO_BATCHES, _RUNS = 64, 1024, 5


def main() -> None:
    """Print a line for each case: the median of some runs."""
    counts = warmup_counts(_STAGES, _MICRO_BATCHES)
    stages = tuple(
        StagePlan(start=n, stop=n + 1, devices=(n,), warmup=count) for n, count in enumerate(counts)
    )
    cluster = preset("config-a:8x8")
    for network in NETWORK_MODELS:
        for equal in (True, False):
            costs = CostModel(model(_STAGES, equal), cluster, network)
            for schedule in ("early-backward", "gpipe", "zero-bubble"):
                seconds = []
                for _ in range(_RUNS):
                    begun = time.perf_counter()
                    step = step_seconds(costs, stages, _MICRO_BATCHES, _MICRO_BATCHES, schedule)
                    seconds.append(time.perf_counter() - begun)
                layers = "equal layers" if equal else "uneven layers"
                print(
                    f"{network:6}  {layers:13}  {schedule:14}  {statistics.median(seconds):5.2f} s"
                    f"  ({min(seconds):.2f} to {max(seconds):.2f})  step {step:.3f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
