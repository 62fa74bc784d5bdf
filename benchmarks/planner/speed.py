"""How long planning takes, start-up included, and how far the plan can be from the best.

    python -m benchmarks.planner.speed            all sizes, each in a process of its own
    python -m benchmarks.planner.speed 16x60      one size in this process

Goals: 16 devices and 60 layers within 1 s, 32 devices within 2 s, 512 devices and 32 equal blocks
within 5 s, 1024 devices and 200 uneven layers within 20 s. Where the gap to the bound is above 5 %,
it is taken apart: what the bound's inequalities give for the plan's own layout, and the plan simulated
with what the bound relaxes.
"""

from __future__ import annotations

import compileall
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

START = time.perf_counter()

import numpy as np  # noqa: E402

import dapple  # noqa: E402
from dapple.cluster import Link, preset  # noqa: E402
from dapple.costs import CostModel  # noqa: E402
from dapple.planner import make_plan  # noqa: E402
from dapple.planner.bounds import layout_bounds  # noqa: E402
from dapple.planner.problem import Problem  # noqa: E402
from dapple.records import LayerProfile, ModelProfile, Plan, TensorProfile  # noqa: E402
from dapple.simulator import step_seconds  # noqa: E402

SIZES = {
    "16x60": (2, 60, False, 256, 1.0),
    "32x60": (4, 60, False, 256, 2.0),
    "512x32": (64, 32, True, 2048, 5.0),
    "1024x200": (128, 200, False, 4096, 20.0),
}
"""Name: machines of 8, layers, equal or not, global batch size, seconds allowed."""
_GAP = 1.05
"""Gaps above this are looked into."""


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


def granted(plan: Plan, profile: ModelProfile) -> dict[str, float]:
    """Steps of the same plan with what the bound relaxes: which part of the gap each explains.

    Layouts that are worse here may be better there, so each may explain more than it shows.
    """
    free = plan.cluster.model_copy(
        update={
            "machines": tuple(
                group.model_copy(update={"outside": _uncrowded(group.outside)})
                for group in plan.cluster.machines
            )
        }
    )
    count, depth = plan.num_micro_batches, plan.num_stages
    ahead = tuple(
        stage.model_copy(update={"warmup": min(count, max(stage.warmup, 2 * (depth - n) - 1))})
        for n, stage in enumerate(plan.stages)
    )
    nothing = {"bytes_per_sample": 0.0, "fixed_bytes": 0.0}
    tensors = tuple(tensor.model_copy(update=nothing) for tensor in profile.tensors)
    unsent = profile.model_copy(update={"tensors": tensors})
    cases = {
        "no contention": (profile, free, plan.stages),
        "transfers for free": (unsent, plan.cluster, plan.stages),
        "policy B's warm-up, whatever the memory": (profile, plan.cluster, ahead),
    }
    problem = Problem(profile, plan.cluster, plan.global_batch_size)
    bounds = np.array([[stage.start for stage in plan.stages] + [profile.num_layers]])
    devices = tuple(stage.devices for stage in plan.stages)
    (least,) = layout_bounds(problem.tables(count), bounds, devices)
    simulated = {
        name: step_seconds(
            CostModel(costs, cluster, plan.network_model),
            stages,
            plan.global_batch_size,
            count,
            plan.schedule,
        )
        for name, (costs, cluster, stages) in cases.items()
    }
    return {"the bound's inequalities for this layout": float(least), **simulated}


def _uncrowded(link: Link | None) -> Link | None:
    """Flows and rings as fast as before, through a card that nothing fills."""
    if link is None:
        return None
    width = link.bandwidth
    rates = {
        "bandwidth": width * 1e4,
        "flow_bandwidth": min(width, link.flow_bandwidth or width),
        "allreduce_bandwidth": min(width, link.allreduce_bandwidth or width),
    }
    return link.model_copy(update=rates)


def run(name: str) -> None:
    """Plan one size and print what it took."""
    machines, layers, equal, batch, allowed = SIZES[name]
    profile = model(layers, equal)
    plan = make_plan(profile, preset(f"config-a:{machines}x8"), batch)
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
    if bound and step > bound * _GAP:
        for what, seconds in granted(plan, profile).items():
            print(
                f"{'':>9}  {what}: step {seconds:.4f} s, gap {seconds / bound - 1:.1%}", flush=True
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for size in sys.argv[1:]:
            run(size)
    else:
        # As pip leaves what it installs, which saves a tenth of a second.
        compileall.compile_dir(Path(dapple.__file__).parent, quiet=1)
        for size in SIZES:
            subprocess.run([sys.executable, "-m", "benchmarks.planner.speed", size], check=True)
