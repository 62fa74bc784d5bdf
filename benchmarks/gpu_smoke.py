"""Does dapple work on these GPUs? Gradients, memory and timeline on one or several of them.

    python -m benchmarks.gpu_smoke                                      one GPU
    torchrun --nproc-per-node 4 -m benchmarks.gpu_smoke                 four of this machine
    torchrun --nnodes 2 --nproc-per-node 8 ... -m benchmarks.gpu_smoke  of several machines

For every plan that the number of ranks allows (one stage, a pipeline, a pipeline of unequal
replicas) rank 0 says whether it holds that

- gradients equal those of one process in float64, after one step of plain gradient descent,
- the allocator saw a peak, no lower than what is there all the time,
- the timeline has every computation, and none overlaps another on its rank,
- bf16 autocast trains: the loss falls over a few steps.

Without a GPU it runs on CPUs over gloo, which is how it is tested: nobody has run it on a GPU yet.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.graph import capture
from dapple.records import Plan, StagePlan, Timeline
from dapple.runtime.process import default_device, ensure_process_group
from dapple.runtime.trainer import Trainer
from dapple.schedule import warmup_counts
from dapple.units import format_bytes
from dapple.zoo.gpt import GPT, next_byte_loss

ROWS, MICRO_BATCHES, SEQUENCE = 13, 4, 32
TOLERANCE = 1e-9


def main() -> None:
    """Run every check; the exit code is 1 if one failed."""
    device = default_device()
    ensure_process_group(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    world = dist.get_world_size()
    _say(f"{world} ranks on {device.type}, backend {dist.get_backend()}")
    passed = [_check(replicas, device) for replicas in _plans(world)]
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(not all(passed))


def _plans(world: int) -> list[tuple[int, ...]]:
    """Replicas per stage: all on one stage, one each, and something unequal."""
    plans: list[tuple[int, ...]] = [(world,)]
    if world >= 2:
        plans.append((1,) * min(world, 4) if world <= 4 else (world - 3, 1, 1, 1))
    if world >= 3:
        plans.append((world - 1, 1))
    return [p for p in dict.fromkeys(plans) if sum(p) == world]


def _check(replicas: Sequence[int], device: torch.device) -> bool:
    _say(f"stages with replicas {':'.join(map(str, replicas))}")
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (ROWS, SEQUENCE))
    targets = torch.randint(0, 256, (ROWS, SEQUENCE))
    results = [
        _same_gradients(replicas, device, tokens, targets),
        _memory_and_timeline(replicas, device, tokens, targets),
        _bf16(replicas, device, tokens, targets),
    ]
    return all(results)


def _model(dtype: torch.dtype) -> GPT:
    torch.manual_seed(1)
    return GPT(width=64, layers=6, heads=4, context=SEQUENCE).to(dtype)


def _trainer(
    replicas: Sequence[int], device: torch.device, dtype: torch.dtype, lr: float, **options: object
) -> Trainer:
    example = torch.zeros(4, SEQUENCE, dtype=torch.int64)
    graph = capture(_model(dtype), example, loss=next_byte_loss, name="gpt")
    numbers = iter(range(sum(replicas)))
    count = len(replicas)
    ends = [graph.num_layers * s // count for s in range(count + 1)]
    kind = DeviceKind(name=device.type, memory=2**40)
    machine = Machines(devices=sum(replicas), kind=kind, inside=Link(bandwidth=1e9))
    plan = Plan(
        model="gpt",
        global_batch_size=ROWS,
        micro_batch_size=-(-ROWS // MICRO_BATCHES),
        num_micro_batches=MICRO_BATCHES,
        cluster=Cluster(name="smoke", machines=(machine,)),
        stages=tuple(
            StagePlan(
                start=start,
                stop=stop,
                devices=tuple(next(numbers) for _ in range(number)),
                warmup=warmup,
            )
            for (start, stop), number, warmup in zip(
                itertools.pairwise(ends),
                replicas,
                warmup_counts(count, MICRO_BATCHES, "A"),
                strict=True,
            )
        ),
    )
    return Trainer(
        graph,
        plan,
        lambda parameters: torch.optim.SGD(parameters, lr=lr),
        device=device,
        **options,  # type: ignore[arg-type]
    )


def _same_gradients(
    replicas: Sequence[int], device: torch.device, tokens: torch.Tensor, targets: torch.Tensor
) -> bool:
    trainer = _trainer(replicas, device, torch.float64, lr=1.0)
    loss = trainer.step(tokens, targets).loss
    alone = _model(torch.float64).to(device)
    expected = next_byte_loss(alone(tokens.to(device)), targets.to(device))
    expected.backward()
    after = {n: p.detach() - p.grad for n, p in alone.named_parameters() if p.grad is not None}
    worst = abs(loss - expected.item())
    for name, value in trainer.state_dict().items():
        if name in after:
            worst = max(worst, float((value - after[name]).abs().max()))
    found = torch.tensor(worst, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    trainer.close()
    return _verdict("gradients", float(found) < TOLERANCE, f"largest error {float(found):.1e}")


def _memory_and_timeline(
    replicas: Sequence[int], device: torch.device, tokens: torch.Tensor, targets: torch.Tensor
) -> bool:
    trainer = _trainer(replicas, device, torch.float32, lr=0.1)
    trainer.step(tokens, targets)
    with trainer.measure_memory() as meter:
        trainer.step(tokens, targets)
    timeline = trainer.timeline(meter.peak_bytes)
    resident = trainer.resident_bytes()
    trainer.close()
    peaks = [peak or 0 for peak in timeline.peak_bytes]
    plausible = meter.peak_bytes >= resident
    shown = ", ".join(map(format_bytes, peaks))
    return _verdict("memory", plausible, f"peak of each rank {shown}") & _verdict(
        "timeline", _is_whole(timeline), f"step {1e3 * timeline.step_seconds:.1f} ms"
    )


def _is_whole(timeline: Timeline) -> bool:
    """Computations of one rank never overlap, and each forward has its backward."""
    kinds = ("forward", "backward")
    for rank in range(len(timeline.machine_of_rank)):
        own = [s for s in timeline.spans if s.rank == rank and s.kind in kinds]
        own.sort(key=lambda span: span.start)
        if any(b.start < a.end - 1e-9 for a, b in itertools.pairwise(own)):
            return False
        counts = [sum(span.kind == kind for span in own) for kind in kinds]
        if not own or counts[0] != counts[1]:
            return False
    return True


def _bf16(
    replicas: Sequence[int], device: torch.device, tokens: torch.Tensor, targets: torch.Tensor
) -> bool:
    trainer = _trainer(replicas, device, torch.float32, lr=0.5, precision="bf16")
    losses = [trainer.step(tokens, targets).loss for _ in range(5)]
    trainer.close()
    return _verdict("bf16", losses[-1] < losses[0], f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def _verdict(what: str, passed: bool, figure: str) -> bool:
    found = torch.tensor(float(passed), device=default_device())
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    _say(f"  {'ok  ' if found else 'FAIL'} {what}: {figure}")
    return bool(found)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


if __name__ == "__main__":
    main()
