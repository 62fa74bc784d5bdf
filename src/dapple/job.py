"""A training job: what `dapple train job.toml` is told. See docs/formats.md."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dapple.errors import DappleError, FileError
from dapple.files import check_output, describe_validation, read_text
from dapple.planner import ANY, PLANNERS
from dapple.planner.memory import OPTIMIZER_STATE
from dapple.schedule import SCHEDULES, is_file
from dapple.units import parse_bytes

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=True)]
# Those of torch.optim that a pipeline can serve, in small letters.
OPTIMIZERS = tuple(name for name in OPTIMIZER_STATE if name != "momentum")


def _memory(value: Any) -> Any:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError('write it like "16 GiB"')
    try:
        return parse_bytes(value, "memory")
    except (DappleError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _function(value: str) -> str:
    module, colon, name = value.partition(":")
    if not (module and colon and name):
        raise ValueError('write it like "my_module:function"')
    return value


def _one_of_or_function(kind: str, names: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if ":" in value:
            return _function(value)
        if value.lower() not in names:
            raise ValueError(
                f'unknown {kind}; known: {", ".join(names)}, or your own as "my_module:function"'
            )
        return value

    return AfterValidator(check)


def _metric_names(value: dict[str, str]) -> dict[str, str]:
    if "loss" in value:
        raise ValueError('"loss" is the loss itself; call the metric something else')
    return value


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values or list(values) != sorted(set(values)):
        raise ValueError("must ascend; write it like [1, 2, 4]")
    return values


def _known(kind: str, names: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"unknown {kind}; known: {', '.join(names)}")
        return value

    return AfterValidator(check)


FunctionPath = Annotated[str, AfterValidator(_function)]


def _schedule(value: str) -> str:
    if value not in (*SCHEDULES, ANY) and not is_file(value):
        raise ValueError(f"unknown schedule; known: {', '.join(SCHEDULES)}, {ANY}, or a .csv file")
    return value


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSection(_Section):
    """The model.

    Attributes:
        factory: a zoo name, or "module:function" that returns a `dapple.Workload`.
        arguments: handed to the factory.
        loss: "module:function" of (output, targets), instead of the workload's.
        weight: "module:function" of (inputs, targets) that counts what that loss is a mean over;
            None with a loss of one's own: rows.
    """

    factory: str
    arguments: dict[str, Any] = {}
    loss: FunctionPath | None = None
    weight: FunctionPath | None = None


class DataSection(_Section):
    """The data.

    Attributes:
        factory: "module:function", called as factory(split, global_batch_size=..., seed=...,
            **arguments) with split "train" or "validation"; returns an iterator of (inputs,
            targets), the same on every rank.
        arguments: handed to the factory.
        validation_batches: batches of each validation.
    """

    factory: FunctionPath
    arguments: dict[str, Any] = {}
    validation_batches: Annotated[int, Field(ge=0)] = 2


class ClusterSection(_Section):
    """Where it runs.

    Attributes:
        name: "local" measures this machine; else a cluster file or preset.
        devices: local devices; processes that profiling and training start here.
        memory: of each device, such as "110 MiB"; None: the cluster's own.
    """

    name: str = "local"
    devices: Count = 2
    memory: Annotated[int, Field(gt=0), BeforeValidator(_memory)] | None = None


class PlanSection(_Section):
    """The plan.

    Attributes:
        file: a plan file, or "auto": profile the model and plan.
        micro_batch_size: fixed by hand; None: chosen.
        planner: which planner.
        schedule: which schedule.
        recompute: stages may run their forwards again where memory is short.
        shard: replicas may share out their optimizer's state, where memory is short or the update
            shorter for it.
        profile_batch_sizes: rows that are profiled.
    """

    file: str = "auto"
    micro_batch_size: Count | None = None
    planner: Annotated[str, _known("planner", PLANNERS)] = "dapple"
    schedule: Annotated[str, AfterValidator(_schedule)] = "early-backward"
    recompute: bool = False
    shard: bool = False
    profile_batch_sizes: Annotated[tuple[Count, ...], AfterValidator(_ascending)] = (1, 2, 4, 8)


class OptimizerSection(_Section):
    """The optimizer.

    Attributes:
        name: a class of `torch.optim`, or "module:function" called as function(parameters,
            **arguments).
        arguments: keyword arguments.
        groups: options of parameter groups, by patterns of the model's parameter names.
    """

    name: Annotated[str, _one_of_or_function("optimizer", OPTIMIZERS)] = "adamw"
    arguments: dict[str, Any] = {"lr": 3e-4}
    groups: dict[str, dict[str, Any]] = {}

    @property
    def state_like(self) -> str:
        """Whose state the planner reckons with: one of `OPTIMIZER_STATE`."""
        name = self.name.lower()
        if name == "sgd" and self.arguments.get("momentum"):
            return "momentum"
        return name if name in OPTIMIZER_STATE else "adamw"


class SchedulerSection(_Section):
    """How the learning rate moves, once per update.

    Attributes:
        name: a class of `torch.optim.lr_scheduler`, or "module:function" called as
            function(optimizer, **arguments).
        arguments: keyword arguments.
    """

    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, Any] = {}


class TrainingSection(_Section):
    """How long, and on what batches.

    Attributes:
        steps: optimizer steps.
        global_batch_size: rows of a step over all devices.
        seed: of weights, data order and dropout.
        validate_every: steps between validations; 0: only before the first and after the last.
        steps_without_memory_limit: steps of the best plan without `cluster.memory`, trained
            afterwards to show what the limit costs.
        precision: "float32", or autocast in "bf16" or "fp16".
        clip_norm: the largest norm of the whole model's gradients; inf only measures it.
        norm_type: the p of that norm.
        batch_norm: statistics over the rows of a whole micro-batch, or of each replica apart.
        compile: compile each stage with `torch.compile`.
    """

    steps: Count
    global_batch_size: Count
    seed: int = 0
    validate_every: Annotated[int, Field(ge=0)] = 0
    steps_without_memory_limit: Annotated[int, Field(ge=0)] = 0
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    clip_norm: Positive | None = None
    norm_type: Positive = 2.0
    batch_norm: Literal["global", "local"] = "global"
    compile: bool = False


class Job(_Section):
    """A training job.

    Attributes:
        folder: where results go, relative to where the command runs.
        metrics: "module:function" of (output, targets) by name, computed in validation.
    """

    name: str
    folder: str
    model: ModelSection
    data: DataSection
    cluster: ClusterSection = ClusterSection()
    plan: PlanSection = PlanSection()
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection | None = None
    metrics: Annotated[dict[str, FunctionPath], AfterValidator(_metric_names)] = {}
    training: TrainingSection


def check_results(folder: Path) -> None:
    """Find out before hours of training that what a run leaves in its folder can't be written.

    Raises:
        FileError: some of it can't be; names it.
    """
    for name in ("plan.json", "metrics.jsonl", "timeline.json", "trace.json", "weights.pt"):
        check_output(folder / name)
    check_output(folder / "weights.sharded", folder=True)


def load_job(path: str | Path) -> Job:
    """Read a job file.

    Raises:
        FileError: missing, not TOML, or a bad field: names file, field and value.
    """
    try:
        return Job.model_validate(tomllib.loads(read_text(path)))
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        raise FileError(f"{path}: {describe_validation(error)}") from error
