"""Recomputation and a sharded optimizer: peak memory predicted and measured.

    python -m benchmarks.runtime.savings

A GPT on two ranks of this machine, AdamW, M micro-batches. Peaks are those of the fuller rank.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.runtime.ranks import answer, run_ranks, under_way
from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.graph import LayerGraph, capture
from dapple.profiler.measured import measure_profile
from dapple.records import ModelProfile, Plan, StagePlan
from dapple.runtime.trainer import Trainer
from dapple.schedule import warmup_counts
from dapple.simulator import simulate
from dapple.workload import Workload
from dapple.zoo.gpt import GPT, next_byte_loss

MIB = 2**20


def main() -> None:
    """Start the two ranks and print the table, or be one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=128)
    options = parser.parse_args()
    if under_way():
        _rank(options)
        return
    names = ("rows", "micro_batches", "width", "layers", "context")
    arguments = [f"--{n.replace('_', '-')}={getattr(options, n)}" for n in names]
    print("| plan | predicted | measured | difference |\n|---|---|---|---|")
    for name, predicted, measured in run_ranks("benchmarks.runtime.savings", 2, arguments, None):
        difference = f"{100 * (predicted / measured - 1):+.1f} %"
        sizes = f"{predicted / MIB:.1f} MiB | {measured / MIB:.1f} MiB"
        print(f"| {name} | {sizes} | {difference} |")


def _rank(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rows = (options.rows // 2, options.rows)
    profile = measure_profile(_graph(options), _workload(options), batch_sizes=rows, rounds=1)
    found = [
        (name, *_peaks(options, profile, plan)) for name, plan in _plans(options, profile).items()
    ]
    if dist.get_rank() == 0:
        answer(found)
    dist.barrier()
    dist.destroy_process_group()


def _workload(options: argparse.Namespace) -> Workload:
    torch.manual_seed(0)
    model = GPT(width=options.width, layers=options.layers, context=options.context)

    def tokens(rows: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, options.context))

    return Workload("gpt", model, lambda rows: (tokens(rows),), tokens, next_byte_loss)


def _graph(options: argparse.Namespace) -> LayerGraph:
    workload = _workload(options)
    return capture(workload.model, workload.inputs(4), loss=workload.loss, name="gpt")


def _plans(options: argparse.Namespace, profile: ModelProfile) -> dict[str, Plan]:
    half = profile.num_layers // 2
    edges = (0, half, profile.num_layers)
    blocks = [tuple((n, n + 1) for n in range(a, b)) for a, b in itertools.pairwise(edges)]
    plans: dict[str, Plan] = {}
    for schedule in ("early-backward", "gpipe"):
        for name, again in (
            ("", (False, False)),
            (", recomputed", (True, True)),
            (", each layer recomputed", (blocks[0], blocks[1])),
        ):
            warmup = warmup_counts(2, options.micro_batches, "B")
            stages = tuple(
                StagePlan(start=a, stop=b, devices=(s,), warmup=warmup[s], recompute=again[s])
                for s, (a, b) in enumerate(itertools.pairwise(edges))
            )
            plans[f"two stages, {schedule}{name}"] = _plan(options, stages, schedule)
    for name, shard in (("", "none"), (", optimizer sharded", "optimizer")):
        one = StagePlan.model_validate(
            {"start": 0, "stop": edges[-1], "devices": (0, 1), "shard": shard}
        )
        plans[f"two replicas{name}"] = _plan(options, (one,), "early-backward")
    return plans


def _plan(options: argparse.Namespace, stages: tuple[StagePlan, ...], schedule: str) -> Plan:
    machine = Machines(
        devices=2, kind=DeviceKind(name="cpu", memory=2**40), inside=Link(bandwidth=1e9)
    )
    return Plan(
        model="gpt",
        global_batch_size=options.rows * options.micro_batches,
        micro_batch_size=options.rows,
        num_micro_batches=options.micro_batches,
        schedule=schedule,
        cluster=Cluster(name="two", machines=(machine,)),
        stages=stages,
    )


def _peaks(options: argparse.Namespace, profile: ModelProfile, plan: Plan) -> tuple[int, int]:
    """Predicted and measured peak of the fuller rank, bytes."""
    workload = _workload(options)
    trainer = Trainer(_graph(options), plan, _adamw, device=torch.device("cpu"))
    rows = plan.global_batch_size
    batch: tuple[Any, Any] = workload.inputs(rows)[0], workload.targets(rows)  # type: ignore[misc]
    trainer.step(*batch)
    with trainer.measure_memory() as meter:
        trainer.step(*batch)
    peak = torch.tensor([meter.peak_bytes])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    predicted = simulate(plan, profile).peak_bytes
    trainer.close()
    return max(p or 0 for p in predicted), int(peak)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


if __name__ == "__main__":
    main()
