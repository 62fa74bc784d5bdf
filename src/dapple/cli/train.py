"""`dapple train`: profile, plan and train what a job file says."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapple.cli import common
from dapple.cli.job_check import check_job
from dapple.errors import InputError, PlanError, RunError

if TYPE_CHECKING:
    from rich.console import Console

    from dapple.cluster import Cluster
    from dapple.job import Job
    from dapple.planner import SearchResult
    from dapple.records import ModelProfile, Plan, Timeline

NO_LIMIT = "without-memory-limit"


def train(
    job: Annotated[Path, typer.Argument(help="A job file.")],
    plan: Annotated[
        Path | None, typer.Option(help="A plan file, instead of the one the job names.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of the job's.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder, instead of the job's.")] = None,
) -> None:
    """Profile, plan and train what a job file says; starts torchrun unless it runs under it.

    Example: dapple train examples/demo.toml
    """
    common.require_torch("train")
    from dapple.job import load_job
    from dapple.runtime.launch import under_torchrun

    found = load_job(job)
    count = found.training.steps if steps is None else steps
    if count < 1:
        raise InputError(f"--steps is {count}; train at least 1 step")
    folder = output or Path(found.folder)
    if under_torchrun():
        _train_here(found, plan, folder, count)
    else:
        _Session(job, found, folder, count).run(plan)


def _train_here(job: Job, plan_file: Path | None, folder: Path, steps: int) -> None:
    """One rank of a run."""
    from dapple.records import Plan, load_record
    from dapple.runtime.worker import run_job

    path = plan_file or (None if job.plan.file == "auto" else Path(job.plan.file))
    if path is None:
        raise PlanError(
            "under torchrun all ranks need one plan file; make it with `dapple plan` and pass "
            "--plan, or run `dapple train` without torchrun"
        )
    with common.step_progress(steps) as report:
        run_job(job, load_record(Plan, path), folder, steps, report=report)


class _Session:
    """Profile, plan, start torchrun, compare: what one `dapple train` on this machine does."""

    def __init__(self, path: Path, job: Job, folder: Path, steps: int) -> None:
        self._path = path
        self._job = job
        self._folder = folder
        self._steps = steps
        self._console: Console = common.console()
        self._simulated: Timeline | None = None

    def run(self, plan_file: Path | None) -> None:
        """Everything, in order."""
        from dapple.job import check_results
        from dapple.records import Plan, load_record
        from dapple.schedule import planned_schedule

        path = plan_file or (None if self._job.plan.file == "auto" else Path(self._job.plan.file))
        plan = load_record(Plan, path) if path is not None else None
        cluster = None if plan is not None else self._named_cluster()
        # Before minutes of profiling: everything else that the job names is there.
        check_results(self._folder)
        check_job(self._job)
        if plan is not None:
            self._check_devices("the plan uses", plan.num_devices)
            # Before processes start; what needs the model is checked by each of them.
            warmup = [stage.warmup for stage in plan.stages]
            planned_schedule(plan.schedule, plan.num_micro_batches, warmup, plan.positions)
            self._train(plan, self._folder, self._steps)
            return
        profile, cluster = self._profile(cluster)
        limited = cluster
        if self._job.cluster.memory is not None:
            limited = cluster.with_memory(self._job.cluster.memory)
        result = self._plan(profile, limited, self._folder)
        measured = self._train(result.plan, self._folder, self._steps)
        extra = self._job.training.steps_without_memory_limit
        if extra and self._job.cluster.memory is not None:
            self._compare(profile, cluster, result.plan, measured, extra)

    def _named_cluster(self) -> Cluster | None:
        """The cluster that the job names; None is this machine, yet to be measured."""
        if self._job.cluster.name == "local":
            return None
        cluster = common.find_cluster(self._job.cluster.name)
        self._check_devices(f"cluster {cluster.name} has", cluster.num_devices)
        return cluster

    def _check_devices(self, who: str, count: int) -> None:
        devices = self._job.cluster.devices
        if count > devices:
            raise PlanError(
                f"{who} {count} devices, but the job has {devices}; set devices = {count} in its "
                "[cluster], take another plan or cluster, or start the ranks with torchrun"
            )

    def _profile(self, cluster: Cluster | None) -> tuple[ModelProfile, Cluster]:
        from dapple.profiler.local import ProfileRequest, profile_locally
        from dapple.runtime.recipe import workload_factory

        job = self._job
        request = ProfileRequest(
            factory=workload_factory(job),
            devices=job.cluster.devices,
            batch_sizes=job.plan.profile_batch_sizes,
            seed=job.training.seed,
            precision=job.training.precision,
        )
        with common.progress("profiling") as report:
            profile, local = profile_locally(request, report)
        if job.training.batch_norm == "local":
            profile = profile.without_statistics()
        profile.save(self._folder / "profile.json")
        cluster = cluster or local
        common.save_cluster(cluster, self._folder / "cluster.toml")
        self._console.print(
            f"profiled {profile.num_layers} layers with {profile.concurrency} processes busy: "
            f"{self._folder / 'profile.json'}"
        )
        common.print_notes(profile)
        return profile, cluster

    def _plan(self, profile: ModelProfile, cluster: Cluster, folder: Path) -> SearchResult:
        from dapple.planner import search
        from dapple.reporting import pipeline_drawing, plan_table
        from dapple.simulator import simulate

        job = self._job
        result = search(
            profile,
            cluster,
            job.training.global_batch_size,
            micro_batch_size=job.plan.micro_batch_size,
            planner=job.plan.planner,
            optimizer=job.optimizer.state_like,
            schedule=job.plan.schedule,
            recompute=job.plan.recompute,
            shard=job.plan.shard,
        )
        result.plan.save(folder / "plan.json")
        for refusal in result.refusals:
            self._console.print(str(refusal))
        self._console.print(plan_table(result.plan))
        self._simulated = simulate(result.plan, profile)
        self._console.print(pipeline_drawing(self._simulated, width=self._console.width))
        return result

    def _train(self, plan: Plan, folder: Path, steps: int) -> float:
        """Train under torchrun and compare with the prediction; the median step's seconds."""
        from dapple.records import Timeline, load_record
        from dapple.reporting import chrome_trace, predicted_against_measured, waiting_table
        from dapple.runtime.launch import launch

        plan_file = folder / "plan.json"
        plan.save(plan_file)
        (folder / "timeline.json").unlink(missing_ok=True)
        arguments = ["train", str(self._path), f"--plan={plan_file}", f"--steps={steps}"]
        launch(plan.num_devices, "dapple", [*arguments, f"--output={folder}"])
        rows = _metrics(folder)
        self._print_losses(rows)
        seconds = [r["seconds"] for r in rows if "seconds" in r and (r["step"] > 2 or steps <= 2)]
        median: float = statistics.median(seconds)
        if (folder / "timeline.json").exists():
            measured = load_record(Timeline, folder / "timeline.json")
            common.write_json(folder / "trace.json", chrome_trace(measured))
            if plan.predicted is not None:
                whole_run = measured.model_copy(update={"step_seconds": median})
                self._console.print(predicted_against_measured(plan, whole_run))
            self._console.print(waiting_table(self._simulated, measured))
        return median

    def _print_losses(self, rows: list[dict[str, Any]]) -> None:
        trained = [r["loss"] for r in rows if "loss" in r]
        valid = [r["validation_loss"] for r in rows if "validation_loss" in r]
        if trained:
            self._console.print(f"training loss {trained[0]:.3f} -> {trained[-1]:.3f}")
        if valid:
            self._console.print(f"validation loss {valid[0]:.3f} -> {valid[-1]:.3f}")
        for name in self._job.metrics:
            values = [r[f"validation_{name}"] for r in rows if f"validation_{name}" in r]
            if values:
                self._console.print(f"validation {name} {values[0]:.3f} -> {values[-1]:.3f}")

    def _compare(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        limited: Plan,
        limited_seconds: float,
        steps: int,
    ) -> None:
        folder = self._folder / NO_LIMIT
        self._console.rule("the same without the memory limit")
        free = self._plan(profile, cluster, folder).plan
        seconds = self._train(free, folder, steps)
        self._console.print(
            f"median step with the limit {limited_seconds:.3f} s ({_shape(limited)}), "
            f"without {seconds:.3f} s ({_shape(free)}): the limit costs a factor of "
            f"{limited_seconds / seconds:.2f}"
        )


def _shape(plan: Plan) -> str:
    if plan.num_stages == 1:
        return f"data parallel, {plan.num_devices} replicas"
    return f"{plan.num_stages} stages, replicas " + ":".join(str(s.replicas) for s in plan.stages)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise RunError(f"the run left no {path}; see its output above")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
