"""What an action costs beside its computation: ours beside a bare loop written by hand.

    python -m benchmarks.runtime.overhead

Two stages of one linear layer of 8 x 8, many micro-batches of one row, on two processes. The loop
does what any pipeline must: receives, forward, send, backward, in the order of early backward, and
a sum of gradients over nobody. Goal: at most 1.5 times its time per action, without spans noted;
and noting spans costs at most 1 % of a step whose actions take 1 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.runtime.ranks import answer, ratio, run_ranks, timed_in_turn, under_way
from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.graph import capture
from dapple.records import Plan, StagePlan
from dapple.runtime.recorder import Recorder
from dapple.runtime.trainer import Trainer

WIDTH = 8
SPANS = 20_000


def main() -> None:
    """Start the two ranks and print the comparison, or be one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=200)
    options = parser.parse_args()
    if under_way():
        _rank(options)
        return
    arguments = [f"--rounds={options.rounds}", f"--micro-batches={options.micro_batches}"]
    found = run_ranks("benchmarks.runtime.overhead", 2, arguments)
    times, actions = found["times"], 2 * options.micro_batches
    for name, seconds in times.items():
        each = statistics.median(seconds) / actions
        print(f"  {name:12} {1e6 * each:7.1f} us per action of one rank")
    print(f"  dapple: {1 / ratio(times, 'bare loop', 'dapple'):.2f} x the time of the bare loop")
    span = found["span_seconds"]
    # A compute span and a receive span for every action.
    print(f"  a span: {1e6 * span:.2f} us, {100 * 2 * span / 1e-3:.2f} % of an action of 1 ms")


def _rank(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rows = options.micro_batches
    torch.manual_seed(0)
    x, y = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    trainer = _dapple(rows)
    sides: dict[str, Any] = {
        "dapple": lambda: trainer.step(x, y),
        "bare loop": _bare(dist.get_rank(), x, y),
    }
    times = timed_in_turn(sides, options.rounds, dist.barrier)
    span = _span_seconds()
    if dist.get_rank() == 0:
        answer({"times": times, "span_seconds": span})
    dist.barrier()
    trainer.close()
    dist.destroy_process_group()


def _dapple(rows: int) -> Trainer:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    graph = capture(model, torch.zeros(4, WIDTH), loss=nn.functional.mse_loss, name="two")
    kind = DeviceKind(name="cpu", memory=2**40)
    machine = Machines(devices=2, kind=kind, inside=Link(bandwidth=1e9))
    plan = Plan(
        model="two",
        global_batch_size=rows,
        micro_batch_size=1,
        num_micro_batches=rows,
        cluster=Cluster(name="two", machines=(machine,)),
        stages=(
            StagePlan(start=0, stop=1, devices=(0,), warmup=2),
            StagePlan(start=1, stop=2, devices=(1,), warmup=1),
        ),
    )
    return Trainer(graph, plan, _sgd, device=torch.device("cpu"), record=False)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _bare(rank: int, x: torch.Tensor, y: torch.Tensor) -> Any:
    layer = nn.Linear(WIDTH, WIDTH)
    optimizer = _sgd(list(layer.parameters()))
    rows, targets = x.split(1), y.split(1)
    count = len(rows)

    def first() -> None:
        outputs: list[torch.Tensor] = []
        sends = []
        order = ["F", *("F", "B") * (count - 1), "B"]
        back = 0
        for kind in order:
            if kind == "F":
                made = layer(rows[len(outputs)])
                outputs.append(made)
                sends.append(dist.isend(made.detach(), 1))
            else:
                gradient = torch.empty(1, WIDTH)
                dist.recv(gradient, 1)
                outputs[back].backward(gradient)
                back += 1
        for send in sends:
            _wait(send)

    def last() -> None:
        sends = []
        for target in targets:
            value = torch.empty(1, WIDTH)
            dist.recv(value, 0)
            value.requires_grad_(True)
            (nn.functional.mse_loss(layer(value), target) / count).backward()
            assert value.grad is not None
            sends.append((dist.isend(value.grad, 0), value.grad))
        for send, _ in sends:
            _wait(send)

    def step() -> None:
        optimizer.zero_grad()
        (first if rank == 0 else last)()
        optimizer.step()

    return step


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()


def _span_seconds() -> float:
    """What noting one span costs."""
    recorder = Recorder(0, 0, 0, torch.device("cpu"), enabled=True)
    times = []
    for _ in range(5):
        recorder.start()
        begin = time.perf_counter()
        for number in range(SPANS):
            with recorder.span("forward", number):
                pass
        times.append((time.perf_counter() - begin) / SPANS)
    return statistics.median(times)


if __name__ == "__main__":
    main()
