"""How long planning takes, start-up included, and how far the plan can be from the best.

    python -m benchmarks.planner.speed            all sizes, each in a process of its own
    python -m benchmarks.planner.speed 16x60      one size in this process

Goals: 16 devices and 60 layers within 1 s, 32 devices within 2 s, 512 devices and 32 equal blocks
within 5 s, 1024 devices and 200 uneven layers within 20 s.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time

START = time.perf_counter()

from dapple.cluster import preset  # noqa: E402
from dapple.planner import make_plan  # noqa: E402
from dapple.records import LayerProfile, ModelProfile, TensorProfile  # noqa: E402

SIZES = {
    "16x60": (2, 60, False, 256, 1.0),
    "32x60": (4, 60, False, 256, 2.0),
    "512x32": (64, 32, True, 2048, 5.0),
    "1024x200": (128, 200, False, 4096, 20.0),
}
"""Name: machines of 8, layers, equal or not, global batch size, seconds allowed."""


def model(layers: int, equal: bool, seed: int = 1) -> ModelProfile:
    """A chain of transformer-like layers, all the same or of 1/4 to 4 times the mean cost."""
    rng = random.Random(seed)
    scales = [1.0 if equal else 4 ** rng.uniform(-1, 1) for _ in range(layers)]
    rows = [
        LayerProfile(
            name=f"block{n}",
            forward_seconds=(0.004 * scale, 0.028 * scale),
            backward_seconds=(0.008 * scale, 0.056 * scale),
            parameter_bytes=round(50e6 * scale),
            saved_bytes=(round(30e6 * scale), round(240e6 * scale)),
        )
        for n, scale in enumerate(scales)
    ]
    tensors = tuple(
        TensorProfile(
            name=f"t{n}",
            producer=n,
            consumers=(n + 1,),
            bytes_per_sample=2e6 if equal else 2e6 * 2 ** rng.uniform(-1, 1),
        )
        for n in range(layers - 1)
    )
    return ModelProfile(
        model=f"chain-{layers}",
        device="v100",
        batch_sizes=(1, 8),
        layers=tuple(rows),
        tensors=tensors,
    )


def run(name: str) -> None:
    """Plan one size and print what it took."""
    machines, layers, equal, batch, allowed = SIZES[name]
    plan = make_plan(model(layers, equal), preset(f"config-a:{machines}x8"), batch)
    wall = time.perf_counter() - START
    usage = resource.getrusage(resource.RUSAGE_SELF)
    assert plan.predicted is not None
    step, bound = plan.predicted.step_seconds, plan.predicted.lower_bound_seconds
    gap = f"{step / bound - 1:.1%}" if bound else "unknown"
    replicas = [stage.replicas for stage in plan.stages]
    shown = ":".join(map(str, replicas)) if len(replicas) < 20 else f"{len(replicas)} stages"
    print(
        f"{name:>9}  {wall:6.2f} s wall  {usage.ru_utime + usage.ru_stime:6.2f} s cpu  "
        f"(goal {allowed:g} s)  step {step:.4f} s  gap to the bound {gap}  "
        f"M = {plan.num_micro_batches}  {shown}",
        flush=True,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for size in sys.argv[1:]:
            run(size)
    else:
        for size in SIZES:
            subprocess.run([sys.executable, "-m", "benchmarks.planner.speed", size], check=True)
