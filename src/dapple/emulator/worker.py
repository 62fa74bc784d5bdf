"""What each rank of an emulation does under torchrun."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapple.costs import CostModel
from dapple.emulator.model import EmulatedModel, clock
from dapple.graph import LayerGraph, capture
from dapple.profiler.links import measure_link
from dapple.profiler.local import local_cluster
from dapple.records import ModelProfile, Plan, Timeline
from dapple.runtime.process import ensure_process_group
from dapple.runtime.topology import Topology
from dapple.runtime.trainer import Trainer
from dapple.runtime.watch import MonitorWatch

WARM_UP = 2
"""Steps before those that count; the second one also measures memory."""


class EmulatedOptimizer(torch.optim.Optimizer):
    """Waits for as long as its layers' update takes, and changes nothing.

    Args:
        parameters: what it would update.
        seconds: of an update.
        state_factor: bytes of state per byte of parameters, held but never touched.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], seconds: float, state_factor: float
    ) -> None:
        super().__init__(parameters, {})
        self._seconds = seconds
        for group in self.param_groups:
            for parameter in group["params"]:
                size = int(state_factor * parameter.numel())
                self.state[parameter]["held"] = parameter.new_empty(size)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Let the seconds pass."""
        clock.wait(self._seconds)


def capture_emulated(profile: ModelProfile) -> LayerGraph:
    """The graph of an emulated profile."""
    clock.on = False
    example = torch.zeros(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(
            EmulatedModel(profile), example, loss=mean_loss, name=profile.model, evaluation=True
        )


def mean_loss(output: torch.Tensor, targets: Any) -> torch.Tensor:
    """A loss that takes no time."""
    return output.mean()


def emulated_trainer(
    graph: LayerGraph, profile: ModelProfile, plan: Plan, rank: int, **arguments: Any
) -> Trainer:
    """This rank's trainer for an emulated model; all its waits take time from now on."""
    topology = Topology.of(plan, rank, plan.num_devices)
    stage = topology.stage_plan
    model = CostModel(profile, plan.cluster)
    whole = model.parameter_bytes(stage.start, stage.stop)

    def optimizer(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        # Of a sharded optimizer these are this replica's share.
        share = sum(parameter.nbytes for parameter in parameters) / whole
        seconds = model.optimizer_seconds(stage.start, stage.stop) * share
        return EmulatedOptimizer(parameters, seconds, plan.optimizer_state_factor)

    trainer = Trainer(graph, plan, optimizer, device=torch.device("cpu"), **arguments)
    clock.on = True
    return trainer


def run_emulation(
    profile: ModelProfile,
    plan: Plan,
    folder: Path,
    steps: int,
    report: Callable[[dict[str, float]], None] | None = None,
) -> None:
    """Emulate on this rank; all ranks of the plan call it.

    Rank 0 writes cluster.toml, the links that the ranks have, and timeline.json, the timeline of
    the median step with the peak memory of one before it.

    Args:
        profile: from `emulated_profile`.
        plan: the plan.
        folder: where results go.
        steps: steps to measure.
        report: told of every step on rank 0.
    """
    ensure_process_group(torch.device("cpu"))
    rank, size = dist.get_rank(), dist.get_world_size()
    watch = MonitorWatch(rank, Topology.of(plan, rank, size).stage)
    with watch.guard():
        watch.progress.set("measure links", None)
        link = measure_link() if size > 1 else None
        watch.progress.set("set up", None)
        trainer = emulated_trainer(capture_emulated(profile), profile, plan, rank, watch=watch)
    batch, peak = torch.zeros(plan.global_batch_size, 1), None
    timelines: list[Timeline] = []
    for step in range(1, WARM_UP + steps + 1):
        if step == WARM_UP:
            with trainer.measure_memory() as meter:
                trainer.step(batch)
            peak = meter.peak_bytes
        else:
            trainer.step(batch)
        if step > WARM_UP:
            timelines.append(trainer.timeline(peak))
            if report is not None and rank == 0:
                report({"step": step - WARM_UP, "seconds": timelines[-1].step_seconds})
    with watch.guard():
        watch.progress.set("write results", None)
        if rank == 0:
            ordered = sorted(timelines, key=lambda timeline: timeline.step_seconds)
            ordered[len(ordered) // 2].save(folder / "timeline.json")
            if link is not None:
                text = local_cluster(size, link).to_toml()
                (folder / "cluster.toml").write_text(text, encoding="utf-8")
    trainer.close()
    dist.destroy_process_group()
