"""Two stages of a transformer of about 50 M parameters: ours beside torch's Schedule1F1B.

    python -m benchmarks.runtime.pipeline                 over the loopback, policy A
    python -m benchmarks.runtime.pipeline --rate 50mbit   over links of 50 Mbit/s, policy B (root)

Both train the same partition in the same two processes, in turn. Goals: over the loopback at least
0.97 of its throughput, and idle time within 5 points of the schedule's bubble (1/9); over the slow
link, with messages of 1 MB, at least 1.3 times its throughput. The two stages are not equally long,
which the bubble of 1/9 does not know: the idle time of the same schedule, simulated with the measured
length of each stage's forward and backward and free messages, is printed beside.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.runtime.ranks import answer, ratio, run_ranks, timed_in_turn, under_way
from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.graph import LayerGraph, StageProgram, capture
from dapple.records import LayerProfile, ModelProfile, Plan, Span, StagePlan, Timeline
from dapple.reporting import stage_times
from dapple.runtime.trainer import Trainer
from dapple.schedule import warmup_counts
from dapple.simulator import simulate
from dapple.zoo.gpt import GPT, next_byte_loss

MICRO_BATCHES = 8
SEQUENCE = 64


def main() -> None:
    """Start the two ranks and print the comparison, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", help="of each rank's link, such as 50mbit; default: loopback")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=0, help="rows of a micro-batch")
    parser.add_argument("--width", type=int, default=704)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    options.rows = options.rows or (6 if options.rate else 3)
    if under_way():
        _rank(options)
        return
    arguments = [f"--{n}={getattr(options, n)}" for n in ("rounds", "rows", "width", "layers")]
    if options.rate:
        arguments.append(f"--rate={options.rate}")
    _report(options, run_ranks("benchmarks.runtime.pipeline", 2, arguments, options.rate))


def _report(options: argparse.Namespace, found: dict[str, Any]) -> None:
    times = found["times"]
    link = options.rate or "loopback"
    print(f"2 stages, {found['parameters'] / 1e6:.0f} M parameters, M = {MICRO_BATCHES}, {link},")
    print(f"messages of {found['message_bytes'] / 2**20:.2f} MiB, {options.rounds} rounds in turn")
    for name, seconds in times.items():
        print(f"  {name:28} median {statistics.median(seconds):.3f} s, least {min(seconds):.3f} s")
    for name in times:
        if name != "torch Schedule1F1B":
            print(f"  {name}: {ratio(times, 'torch Schedule1F1B', name):.3f} x its throughput")
    for name, bubble in found["bubble"].items():
        ideal, unequal = 1 / (MICRO_BATCHES + 1), found["scheduled"][name]
        print(
            f"  {name}: idle {100 * bubble:.1f} % (equal stages: {100 * ideal:.1f} %, stages as long "
            f"as these: {100 * unequal:.1f} %)"
        )


def _rank(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = options.rows * MICRO_BATCHES
    tokens = torch.randint(0, 256, (rows, SEQUENCE))
    targets = torch.randint(0, 256, (rows, SEQUENCE))
    policies = ("A", "B") if options.rate else ("A",)
    ours = {f"dapple, policy {policy}": _dapple(options, rows, policy) for policy in policies}
    _, torch_step = torch_pipeline(*_graph(options), MICRO_BATCHES, tokens, targets)
    sides: dict[str, Any] = {
        name: (lambda trainer=trainer: trainer.step(tokens, targets))
        for name, trainer in ours.items()
    }
    bubbles: dict[str, list[float]] = {name: [] for name in ours}
    scheduled: dict[str, list[float]] = {name: [] for name in ours}

    def noted(name: str) -> Any:
        trainer = ours[name]

        def step() -> None:
            trainer.step(tokens, targets)
            timeline = trainer.timeline()
            bubbles[name].append(_idle(timeline))
            scheduled[name].append(_scheduled_idle(timeline, trainer.topology.plan))

        return step

    sides = {name: noted(name) for name in ours} | {"torch Schedule1F1B": torch_step}
    times = timed_in_turn(sides, options.rounds, dist.barrier)
    if dist.get_rank() == 0:
        answer(
            {
                "times": times,
                "bubble": {name: statistics.median(found) for name, found in bubbles.items()},
                "scheduled": {n: statistics.median(found) for n, found in scheduled.items()},
                "parameters": _parameters(options),
                "message_bytes": options.rows * SEQUENCE * options.width * 4,
            }
        )
    dist.barrier()
    for trainer in ours.values():
        trainer.close()
    dist.destroy_process_group()


def _idle(timeline: Timeline) -> float:
    """Share of the step in which a rank neither computes nor updates, the mean over ranks."""
    busy = [time.compute + time.update for time in stage_times(timeline).values()]
    return 1 - sum(busy) / len(busy) / timeline.step_seconds


def _scheduled_idle(timeline: Timeline, plan: Plan) -> float:
    """The same share in the simulated step, every stage as long as measured, messages for free."""

    def mean(spans: list[Span]) -> float:
        return statistics.fmean([s.end - s.start for s in spans])

    layers = []
    for stage in range(plan.num_stages):
        spans = {kind: [] for kind in ("forward", "backward", "optimizer")}
        for span in timeline.spans:
            if span.stage == stage and span.kind in spans:
                spans[span.kind].append(span)
        layers.append(
            LayerProfile(
                name=f"stage{stage}",
                forward_seconds=(mean(spans["forward"]),),
                backward_seconds=(mean(spans["backward"]),),
                optimizer_seconds=mean(spans["optimizer"]),
            )
        )
    profile = ModelProfile(
        model=plan.model, device="cpu", batch_sizes=(plan.micro_batch_size,), layers=layers
    )
    stages = tuple(
        stage.model_copy(update={"start": n, "stop": n + 1}) for n, stage in enumerate(plan.stages)
    )
    return _idle(simulate(plan.model_copy(update={"stages": stages}), profile))


def _parameters(options: argparse.Namespace) -> int:
    model = transformer(options.width, options.layers, SEQUENCE)
    return sum(p.numel() for p in model.parameters())


def transformer(width: int, layers: int, sequence: int) -> GPT:
    """A GPT without tied weights: torch's schedules have no parameters on two stages."""
    torch.manual_seed(0)
    model = GPT(width=width, layers=layers, context=sequence)
    model.head = nn.Linear(width, 256, bias=False)
    return model


def _graph(options: argparse.Namespace) -> tuple[LayerGraph, int]:
    """The captured model and the cut in the middle of its blocks."""
    model = transformer(options.width, options.layers, SEQUENCE)
    example = torch.zeros(4, SEQUENCE, dtype=torch.int64)
    graph = capture(model, example, loss=next_byte_loss, name="gpt")
    return graph, graph.layer_names.index(f"blocks.{options.layers // 2}")


def _dapple(options: argparse.Namespace, rows: int, policy: str) -> Trainer:
    graph, cut = _graph(options)
    kind = DeviceKind(name="cpu", memory=2**40)
    machine = Machines(devices=2, kind=kind, inside=Link(bandwidth=1e9))
    bounds = [(0, cut), (cut, graph.num_layers)]
    plan = Plan(
        model="gpt",
        global_batch_size=rows,
        micro_batch_size=options.rows,
        num_micro_batches=MICRO_BATCHES,
        cluster=Cluster(name="two", machines=(machine,)),
        stages=tuple(
            StagePlan(start=start, stop=stop, devices=(device,), warmup=warmup)
            for device, ((start, stop), warmup) in enumerate(
                zip(bounds, warmup_counts(2, MICRO_BATCHES, policy), strict=True)
            )
        ),
    )
    return Trainer(graph, plan, _sgd, device=torch.device("cpu"))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


class _Part(nn.Module):
    """One of our stage modules, as torch's pipeline wants it: a tensor in, a tensor out."""

    def __init__(self, program: StageProgram) -> None:
        super().__init__()
        self.program = program
        self.inner = program.module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        program = self.program
        inputs = dict.fromkeys(program.reads_inputs, x)
        made, results = program(x.shape[0], inputs, {t.name: x for t in program.reads})
        output: torch.Tensor = (made or results)[0]
        return output


def torch_pipeline(
    graph: LayerGraph, cut: int, micro_batches: int, tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[nn.Module, Callable[[], None]]:
    """This rank's half of a captured model, and a step of torch's Schedule1F1B with it."""
    rank = dist.get_rank()
    program = graph.stage(0, cut) if rank == 0 else graph.stage(cut, graph.num_layers)
    stage = PipelineStage(_Part(program), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=next_byte_loss)
    optimizer = _sgd(list(stage.submod.parameters()))

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=targets, losses=losses)
        optimizer.step()

    return stage.submod, step


if __name__ == "__main__":
    main()
