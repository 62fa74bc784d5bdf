"""Whether simulator and runtime agree: emulated plans of 2 to 8 stages with unequal replicas.

    python -m benchmarks.runtime.emulated

Each plan runs in as many processes, with layers that wait for 25 to 50 ms a row and messages over
the loopback, whose measured figures the simulator gets. Goal: every step within 5 % of the
simulated one.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from dapple.cluster import Cluster, DeviceKind, Link, Machines, load_cluster
from dapple.records import (
    LayerProfile,
    ModelProfile,
    Plan,
    StagePlan,
    TensorProfile,
    Timeline,
    load_record,
)
from dapple.schedule import warmup_counts
from dapple.simulator import simulate

PLANS = (
    ((1, 1), "A"),
    ((2, 1), "B"),
    ((1, 2, 1), "A"),
    ((3, 2, 1, 1), "B"),
    ((1, 1, 2, 1, 1), "A"),
    ((2, 1, 1, 1, 1, 1), "A"),
    ((1, 1, 1, 1, 1, 1, 2), "B"),
    ((1, 2, 1, 1, 1, 1, 1, 1), "A"),
)
"""Replicas of each stage, and the warm-up policy."""
LAYERS = 2
ROWS, MICRO_BATCHES = 3, 6
GOAL = 0.05


def main() -> None:
    """Run every plan, and print simulated and measured steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", type=int, help="number of a single plan")
    options = parser.parse_args()
    chosen = range(len(PLANS)) if options.only is None else [options.only]
    worst = 0.0
    for number in chosen:
        replicas, policy = PLANS[number]
        simulated, measured = _run(replicas, policy, options.steps, number)
        error = simulated / measured - 1
        worst = max(worst, abs(error))
        shape = ":".join(map(str, replicas))
        print(
            f"{len(replicas)} stages {shape:16} policy {policy}: simulated {simulated:.3f} s, "
            f"measured {measured:.3f} s, {100 * error:+.1f} %",
            flush=True,
        )
    print(f"largest difference {100 * worst:.1f} % (goal: {100 * GOAL:.0f} %)")


def _run(replicas: tuple[int, ...], policy: str, steps: int, seed: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = _profile(LAYERS * len(replicas), seed)
        profile.save(folder / "profile.json")
        _plan(replicas, policy).save(folder / "plan.json")
        subprocess.run(
            [
                *(sys.executable, "-m", "dapple", "emulate", str(folder / "plan.json")),
                *("--profile", str(folder / "profile.json"), "--output", str(folder / "out")),
                f"--steps={steps}",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        out = folder / "out"
        measured = load_record(Timeline, out / "timeline.json").step_seconds
        cluster = load_cluster(str(out / "cluster.toml"))
        plan, emulated = (
            load_record(Plan, out / "plan.json"),
            load_record(ModelProfile, out / "profile.json"),
        )
        return simulate(plan, emulated, cluster=cluster, spans=False).step_seconds, measured


def _profile(layers: int, seed: int) -> ModelProfile:
    rng = random.Random(seed)
    rows = []
    for number in range(layers):
        forward = rng.uniform(0.025, 0.05)
        rows.append(
            LayerProfile(
                name=f"layers.{number}",
                forward_seconds=(forward,),
                backward_seconds=(2 * forward,),
                parameter_bytes=400_000,
                saved_bytes=(100_000,),
            )
        )
    tensors = tuple(
        TensorProfile(name=f"t{n}", producer=n, consumers=(n + 1,), bytes_per_sample=100_000)
        for n in range(layers - 1)
    )
    return ModelProfile(
        model="waits", device="none", batch_sizes=(1,), layers=tuple(rows), tensors=tensors
    )


def _plan(replicas: tuple[int, ...], policy: str) -> Plan:
    devices = iter(range(sum(replicas)))
    warmups = warmup_counts(len(replicas), MICRO_BATCHES, policy)
    kind = DeviceKind(name="process", memory=2**40)
    machine = Machines(devices=sum(replicas), kind=kind, inside=Link(bandwidth=1e9))
    return Plan(
        model="waits",
        global_batch_size=ROWS * MICRO_BATCHES,
        micro_batch_size=ROWS,
        num_micro_batches=MICRO_BATCHES,
        cluster=Cluster(name="processes", machines=(machine,)),
        stages=tuple(
            StagePlan(
                start=LAYERS * s,
                stop=LAYERS * (s + 1),
                devices=tuple(next(devices) for _ in range(count)),
                warmup=warmup,
            )
            for s, (count, warmup) in enumerate(zip(replicas, warmups, strict=True))
        ),
    )


if __name__ == "__main__":
    main()
