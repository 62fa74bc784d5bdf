"""Peak bytes of a step beyond parameters, gradients and optimizer: ours, GPipe's and torch's.

    python -m benchmarks.runtime.memory

Two stages of a small transformer on two processes, micro-batches of the same size, M = 16 and 64.
Counted are the storages of tensors that are alive at once: saved activations, boundary buffers,
temporaries. Goal: early backward's peak is the same at both M, and close to K_i times what one
micro-batch saves; GPipe's grows with M, and so do the receive buffers of torch's Schedule1F1B.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.runtime.pipeline import torch_pipeline, transformer
from benchmarks.runtime.ranks import answer, run_ranks, under_way
from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.graph import LayerGraph, capture
from dapple.records import Plan, StagePlan
from dapple.runtime.trainer import Trainer
from dapple.storages import StorageCounter
from dapple.units import format_bytes
from dapple.zoo.gpt import next_byte_loss

ROWS, SEQUENCE, WIDTH, LAYERS = 2, 64, 128, 4
MICRO_BATCHES = (16, 64)
SCHEDULES = ("early-backward", "gpipe")


def main() -> None:
    """Start the two ranks and print the table, or be one of them."""
    argparse.ArgumentParser().parse_args()
    if under_way():
        _rank()
        return
    found = run_ranks("benchmarks.runtime.memory", 2, [])
    single = found["one micro-batch"]
    print("peak beyond parameters, gradients and optimizer; in micro-batches' saved activations")
    print(f"one micro-batch saves {', '.join(map(format_bytes, single))} on stage 0, 1")
    for name, rows in found["peaks"].items():
        cells = [
            f"M = {count}: "
            + ", ".join(
                f"{format_bytes(size)} ({size / one:.1f})"
                for size, one in zip(rows[str(count)], single, strict=True)
            )
            for count in MICRO_BATCHES
        ]
        print(f"  {name:28} {'   '.join(cells)}")


def _rank() -> None:
    dist.init_process_group("gloo")
    peaks: dict[str, dict[int, list[int]]] = {}
    for count in MICRO_BATCHES:
        tokens = torch.zeros(ROWS * count, SEQUENCE, dtype=torch.int64)
        for schedule in SCHEDULES:
            row = peaks.setdefault(f"dapple, {schedule}", {})
            row[count] = _gathered(_ours(schedule, count, tokens))
        row = peaks.setdefault("torch Schedule1F1B", {})
        row[count] = _gathered(_theirs(count, tokens))
    single = _gathered(_saved())
    if dist.get_rank() == 0:
        answer({"peaks": peaks, "one micro-batch": single})
    dist.barrier()
    dist.destroy_process_group()


def _gathered(value: int) -> list[int]:
    values = [None, None]
    dist.all_gather_object(values, value)
    return [int(v or 0) for v in values]


def _graph() -> tuple[LayerGraph, int]:
    model = transformer(WIDTH, LAYERS, SEQUENCE)
    example = torch.zeros(4, SEQUENCE, dtype=torch.int64)
    graph = capture(model, example, loss=next_byte_loss, name="gpt")
    return graph, graph.layer_names.index(f"blocks.{LAYERS // 2}")


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _ours(schedule: str, count: int, tokens: torch.Tensor) -> int:
    graph, cut = _graph()
    kind = DeviceKind(name="cpu", memory=2**40)
    machine = Machines(devices=2, kind=kind, inside=Link(bandwidth=1e9))
    plan = Plan(
        model="gpt",
        global_batch_size=len(tokens),
        micro_batch_size=ROWS,
        num_micro_batches=count,
        schedule=schedule,
        cluster=Cluster(name="two", machines=(machine,)),
        stages=(
            StagePlan(start=0, stop=cut, devices=(0,), warmup=2),
            StagePlan(start=cut, stop=graph.num_layers, devices=(1,), warmup=1),
        ),
    )
    trainer = Trainer(graph, plan, _sgd, device=torch.device("cpu"), record=False)
    trainer.step(tokens, tokens)
    with trainer.measure_memory() as meter:
        trainer.step(tokens, tokens)
    peak = meter.peak_bytes - trainer.resident_bytes()
    dist.barrier()
    trainer.close()
    return peak


def _theirs(count: int, tokens: torch.Tensor) -> int:
    graph, cut = _graph()
    module, step = torch_pipeline(graph, cut, count, tokens, tokens)
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    resident = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    counter = StorageCounter(resident)
    before = sum(t.nbytes for t in resident)
    with counter:
        step()  # the first step, in which torch makes its receive buffers
    return counter.peak_bytes - before


def _saved() -> int:
    """Bytes that the forward of one micro-batch leaves behind on this rank's stage."""
    graph, cut = _graph()
    rank = dist.get_rank()
    program = graph.stage(0, cut) if rank == 0 else graph.stage(cut, graph.num_layers)
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in program.module.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = dict.fromkeys(program.reads_inputs, torch.zeros(ROWS, SEQUENCE, dtype=torch.int64))
    received = {
        t.name: torch.zeros(t.shape_for(ROWS), requires_grad=t.needs_grad) for t in program.reads
    }
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made, results = program(ROWS, inputs, received)
        if results:
            logits: torch.Tensor = results[0]
            nn.functional.cross_entropy(
                logits.flatten(0, 1), torch.zeros(logits.shape[0] * SEQUENCE, dtype=torch.int64)
            )
    del made
    return sum(kept.values())


if __name__ == "__main__":
    main()
