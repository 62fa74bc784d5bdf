"""Two replicas of one stage over slow links: ours beside DistributedDataParallel.

    python -m benchmarks.runtime.replicas                    links of 500 Mbit/s (root)
    python -m benchmarks.runtime.replicas --rate loopback

A transformer of about 50 M parameters, M micro-batches per step accumulated. DDP runs with buckets
of 1, 4 and 25 MB, its AllReduce left out of all backwards but the last one (no_sync). Goal: at
least the throughput of the best of the three.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.runtime.ranks import answer, ratio, run_ranks, timed_in_turn, under_way
from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.graph import capture
from dapple.records import Plan, StagePlan
from dapple.runtime.trainer import Trainer
from dapple.zoo.gpt import GPT, next_byte_loss

SEQUENCE = 64
BUCKETS = (1, 4, 25)


def main() -> None:
    """Start the two ranks and print the comparison, or be one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=2, help="rows of a replica's micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--width", type=int, default=704)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    if under_way():
        _rank(options)
        return
    names = ("rounds", "rows", "micro_batches", "width", "layers")
    arguments = [f"--{n.replace('_', '-')}={getattr(options, n)}" for n in names]
    rate = None if options.rate == "loopback" else options.rate
    found = run_ranks("benchmarks.runtime.replicas", 2, arguments, rate)
    times = found["times"]
    print(f"2 replicas, {found['parameters'] / 1e6:.0f} M parameters, {options.rate},")
    print(f"M = {options.micro_batches}, {options.rounds} rounds in turn")
    for name, seconds in times.items():
        print(f"  {name:12} median {statistics.median(seconds):.3f} s, least {min(seconds):.3f} s")
    for name in times:
        if name != "dapple":
            print(f"  dapple: {ratio(times, name, 'dapple'):.3f} x the throughput of {name}")


def _rank(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rows = 2 * options.rows * options.micro_batches
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (rows, SEQUENCE))
    targets = torch.randint(0, 256, (rows, SEQUENCE))
    trainer = _dapple(options, rows)
    sides: dict[str, Any] = {"dapple": lambda: trainer.step(tokens, targets)}
    for size in BUCKETS:
        sides[f"DDP {size} MB"] = _ddp(options, size, tokens, targets)
    times = timed_in_turn(sides, options.rounds, dist.barrier)
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in _model(options).parameters())
        answer({"times": times, "parameters": parameters})
    dist.barrier()
    trainer.close()
    dist.destroy_process_group()


def _model(options: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(width=options.width, layers=options.layers, context=SEQUENCE)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _dapple(options: argparse.Namespace, rows: int) -> Trainer:
    example = torch.zeros(4, SEQUENCE, dtype=torch.int64)
    graph = capture(_model(options), example, loss=next_byte_loss, name="gpt")
    kind = DeviceKind(name="cpu", memory=2**40)
    machine = Machines(devices=2, kind=kind, inside=Link(bandwidth=1e9))
    plan = Plan(
        model="gpt",
        global_batch_size=rows,
        micro_batch_size=2 * options.rows,
        num_micro_batches=options.micro_batches,
        cluster=Cluster(name="two", machines=(machine,)),
        stages=(StagePlan(start=0, stop=graph.num_layers, devices=(0, 1), warmup=1),),
    )
    return Trainer(graph, plan, _sgd, device=torch.device("cpu"))


def _ddp(
    options: argparse.Namespace, bucket: int, tokens: torch.Tensor, targets: torch.Tensor
) -> Callable[[], None]:
    model = DistributedDataParallel(
        _model(options), bucket_cap_mb=bucket, gradient_as_bucket_view=True
    )
    optimizer = _sgd(list(model.parameters()))
    rank = dist.get_rank()
    # The same rows as ours: each micro-batch cut in two.
    pieces = [
        (a.chunk(2)[rank], b.chunk(2)[rank])
        for a, b in zip(
            tokens.chunk(options.micro_batches), targets.chunk(options.micro_batches), strict=True
        )
    ]

    def step() -> None:
        optimizer.zero_grad()
        for number, (x, y) in enumerate(pieces):
            last = number == len(pieces) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (next_byte_loss(model(x), y) / len(pieces)).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
