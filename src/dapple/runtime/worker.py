"""What each rank does under torchrun for `dapple train`: run a job by a plan."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from dapple.errors import InputError
from dapple.files import cannot_write
from dapple.graph import LayerGraph, capture
from dapple.job import Job, check_results
from dapple.records import Plan, Timeline
from dapple.runtime.data import JobData, Step
from dapple.runtime.optimizers import Parameters
from dapple.runtime.process import default_device, ensure_process_group
from dapple.runtime.recipe import (
    metrics_of,
    optimizer_factory,
    scheduler_factory,
    workload_factory,
)
from dapple.runtime.results import StepResult
from dapple.runtime.topology import Topology
from dapple.runtime.trainer import Trainer
from dapple.runtime.watch import MonitorWatch
from dapple.runtime.wiring import check_model
from dapple.workload import Workload

TIMELINES = 9
"""Steps at the end whose timelines are kept; the one with the median step is written."""

Report = Callable[[dict[str, float]], None]


def run_job(
    job: Job,
    plan: Plan,
    folder: Path,
    steps: int,
    *,
    report: Report | None = None,
) -> None:
    """Train on this rank; all ranks of the plan call it.

    Rank 0 writes metrics.jsonl, one line per step and per validation, and at the end
    timeline.json, the timeline of a median step with the peak memory of the second one. The
    weights go to weights.pt.

    Args:
        job: the job.
        plan: the plan.
        folder: where results go.
        steps: steps to train.
        report: told of every line of metrics.jsonl, on rank 0.
    """
    device = default_device()
    ensure_process_group(device)
    rank = dist.get_rank()
    topology = Topology.of(plan, rank, dist.get_world_size())
    # A mistake in the job is the same on every rank, and no failure of a rank: before the watch.
    check_results(folder)
    workload, graph = _captured(job)
    check_model(graph, plan)
    data = _Data(job)
    optimizer, scheduler = optimizer_factory(job), scheduler_factory(job)
    metrics = metrics_of(job)
    Parameters({}, graph.parameters()).groups(
        job.optimizer.groups
    )  # finds patterns without a match
    watch = MonitorWatch(rank, topology.stage)
    with watch.guard():
        watch.progress.set("set up", None)
        trainer = Trainer(
            graph,
            plan,
            optimizer,
            scheduler=scheduler,
            weight=workload.weight,
            metrics=metrics,
            clip_norm=job.training.clip_norm,
            norm_type=job.training.norm_type,
            precision=job.training.precision,
            batch_norm=job.training.batch_norm,
            compile=job.training.compile,
            device=device,
            seed=job.training.seed,
            watch=watch,
        )
        run = _Run(job, trainer, data, _Log(folder, rank, report))
    done = run.train(steps)
    # What took longest to come by first.
    trainer.save_weights(folder / "weights.pt")
    with watch.guard():
        watch.progress.set("write results", None)
        run.write_timeline(folder)
    trainer.close()
    dist.destroy_process_group()
    if done < steps:
        raise InputError(
            f"the training data ended after {done} of {steps} batches; the weights so far are in "
            f"{folder}, let the data factory go on for more"
        )


def _captured(job: Job) -> tuple[Workload, LayerGraph]:
    torch.manual_seed(job.training.seed)
    workload = workload_factory(job)()
    inputs = workload.inputs(4)
    graph = capture(
        workload.model,
        inputs,
        loss=workload.loss,
        name=workload.name,
        lengths=workload.lengths,
    )
    return workload, graph


class _Data:
    """The job's data, made before the trainer: a mistake in it is no failure of a rank."""

    def __init__(self, job: Job) -> None:
        self.training = JobData(job, "train")
        self.validation_batches = job.data.validation_batches
        if self.validation_batches:
            self.validation = JobData(job, "validation")


class _Run:
    """The training loop of one rank."""

    def __init__(self, job: Job, trainer: Trainer, data: _Data, log: _Log) -> None:
        self._trainer = trainer
        self._log = log
        self._every = job.training.validate_every
        self._data = data.training.steps(trainer)
        self._validation: list[Step] = []
        if data.validation_batches:
            steps = data.validation.steps(trainer)
            self._validation = list(itertools.islice(steps, data.validation_batches))
        self._peak_bytes: int | None = None
        self._timelines: list[Timeline] = []

    def train(self, steps: int) -> int:
        """Train and validate; the steps that there was data for."""
        self._validate(0)
        done = 0
        for step, batch in enumerate(itertools.islice(self._data, steps), start=1):
            result = self._step(step, batch)
            self._log.write(**_row(step, result))
            if step > max(2, steps - TIMELINES):
                self._timelines.append(self._trainer.timeline(self._peak_bytes))
            if step == steps or (self._every and step % self._every == 0):
                self._validate(step)
            done = step
        return done

    def write_timeline(self, folder: Path) -> None:
        """Write the median of the last steps' timelines."""
        if self._trainer.rank == 0 and self._timelines:
            ordered = sorted(self._timelines, key=lambda timeline: timeline.step_seconds)
            ordered[len(ordered) // 2].save(folder / "timeline.json")

    def _step(self, step: int, batch: Step) -> StepResult:
        if step != 2:
            return self._trained(batch)
        # The meter slows a step down; in the second the optimizer's state is there already.
        with self._trainer.measure_memory() as meter:
            result = self._trained(batch)
        self._peak_bytes = meter.peak_bytes
        return result

    def _trained(self, batch: Step) -> StepResult:
        return self._trainer.step(
            batch.inputs, batch.targets, global_batch_size=batch.global_batch_size
        )

    def _validate(self, step: int) -> None:
        if self._validation:
            found = [
                self._trainer.evaluate(b.inputs, b.targets, global_batch_size=b.global_batch_size)
                for b in self._validation
            ]
            means = {
                f"validation_{name}": statistics.fmean(one.metrics[name] for one in found)
                for name in found[0].metrics
            }
            self._log.write(step=step, validation_loss=statistics.fmean(found), **means)


def _row(step: int, result: StepResult) -> dict[str, float]:
    row = {"step": step, "loss": result.loss, "seconds": result.seconds, "rows": result.rows}
    if result.gradient_norm is not None:
        row["gradient_norm"] = result.gradient_norm
    if result.skipped:
        row["skipped"] = True
    return row


class _Log:
    """metrics.jsonl, written by rank 0 and by nobody else."""

    def __init__(self, folder: Path, rank: int, report: Report | None) -> None:
        self._file: IO[str] | None = None
        self._report = report
        self._begin = time.time()
        if rank == 0:
            path = folder / "metrics.jsonl"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("w", encoding="utf-8")
            except OSError as error:
                raise cannot_write(path, error) from error

    def write(self, **fields: float) -> None:
        """Add a line."""
        if self._file is None:
            return
        row = {**fields, "elapsed_seconds": round(time.time() - self._begin, 3)}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._report is not None:
            self._report(row)
