"""A plan: which layers run on which devices, in how many micro-batches, and what to expect."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dapple.cluster import Cluster
from dapple.records.base import Record
from dapple.records.explanation import Explanation

Count = Annotated[int, Field(ge=1)]
MOST_MICRO_BATCHES = 2**16
"""More in one step help nothing, and take minutes to simulate."""


class StagePlan(Record):
    """One pipeline stage.

    Attributes:
        start, stop: its layers, a half-open range.
        devices: device numbers of its replicas; replica r takes the r-th row range.
        warmup: K_i, the most micro-batches in flight (forward done, backward not yet).
        recompute: False, True, or the half-open layer ranges whose activations are recomputed.
        rows: proportional shares of the replicas; None for an even split.
        shard: what the replicas share out among them: nothing, or the optimizer's state.
    """

    start: Annotated[int, Field(ge=0)]
    stop: Count
    devices: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    warmup: Count = 1
    recompute: bool | tuple[tuple[int, int], ...] = False
    rows: tuple[Annotated[float, Field(ge=0, le=1e9)], ...] | None = None
    shard: Literal["none", "optimizer"] = "none"

    @field_validator("shard", mode="before")
    @classmethod
    def _shardable(cls, value: object) -> object:
        if value not in ("none", "optimizer"):
            raise ValueError(
                f'"{value}" is not shared out among replicas yet, optimizer state only; use shard '
                '"optimizer", or more stages with fewer replicas, which hold fewer parameters each'
            )
        return value

    @property
    def replicas(self) -> int:
        """Number of devices that share each micro-batch of this stage."""
        return len(self.devices)


class PredictedStage(Record):
    """What one stage is expected to take per micro-batch (seconds) and hold at its peak."""

    forward_seconds: float
    backward_seconds: float
    send_seconds: float = 0.0
    allreduce_seconds: float = 0.0
    peak_bytes: int | None = None


class Predicted(Record):
    """What the simulator expects of one training step.

    Attributes:
        step_seconds: from the first forward to the last optimizer update, s.
        samples_per_second: global batch size over step_seconds.
        bubble_fraction: share of all devices' time without compute between step start and end.
        lower_bound_seconds: no plan for this profile and cluster that the planner's options allow
            can be faster; None: not computed.
    """

    step_seconds: float
    samples_per_second: float
    bubble_fraction: float
    lower_bound_seconds: float | None = None
    stages: tuple[PredictedStage, ...] = ()


class Plan(Record):
    """How to train a model on a cluster. See docs/formats.md.

    Attributes:
        schedule: a name from `dapple.schedule.SCHEDULES`, or the path of a CSV file.
        virtual: stages per device. Stages that share devices share all of them.
        micro_batch_size: rows of the largest micro-batch before the replica split,
            ceil(global_batch_size / num_micro_batches).
        num_micro_batches: M, into which the global batch is cut (sizes differ by at most one).
        optimizer: name that the memory was computed for.
        optimizer_state_factor: optimizer state in units of the parameters' bytes (Adam: 2).
        network_model: "shared" or "paper", see docs/semantics.md.
        simulate_only: names of what the runtime can't execute in this plan.
        notes: what the planner could not know, in words (memory unchecked, linear scaling, ...).
        explanation: why it was chosen, if that was asked for.
    """

    format: Literal["dapple-plan"] = "dapple-plan"
    version: Literal[1] = 1
    model: str
    global_batch_size: Count
    micro_batch_size: Count
    num_micro_batches: Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)]
    schedule: str = "early-backward"
    planner: str = "dapple"
    virtual: Count = 1
    network_model: Literal["shared", "paper"] = "shared"
    optimizer: str = "adamw"
    optimizer_state_factor: Annotated[float, Field(ge=0, le=1e3)] = 2.0
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    predicted: Predicted | None = None
    cluster: Cluster
    profile_fingerprint: str | None = None
    model_fingerprint: str | None = None
    simulate_only: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    explanation: Explanation | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        position = 0
        for number, stage in enumerate(self.stages):
            if stage.start != position or stage.stop <= stage.start:
                raise ValueError(
                    f"stage {number} covers layers {stage.start}..{stage.stop}; stages must be "
                    f"adjacent and not empty, so it has to start at {position}"
                )
            position = stage.stop
            if stage.rows is not None and len(stage.rows) != stage.replicas:
                raise ValueError(
                    f"stage {number}: rows has {len(stage.rows)} shares, not {stage.replicas}"
                )
        self._check_devices()
        outside = [device for device in self.rank_of_device() if device >= self.cluster.num_devices]
        if outside:
            raise ValueError(
                f"devices {sorted(outside)} are not in the cluster, which has {self.cluster.num_devices}"
            )
        size = -(-self.global_batch_size // self.num_micro_batches)
        if self.micro_batch_size != size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} must be ceil(global_batch_size / "
                f"num_micro_batches) = {size}"
            )
        return self

    def _check_devices(self) -> None:
        seen: set[int] = set()
        for stages in self.positions:
            number = stages[0]
            devices = self.stages[number].devices
            if seen.intersection(devices) or len(set(devices)) != len(devices):
                raise ValueError(f"stage {number} uses devices {sorted(devices)} twice")
            seen.update(devices)
            if self.virtual == 1 and len(stages) > 1:
                raise ValueError(
                    f"stage {stages[1]} uses devices {sorted(devices)} twice: stage {number} has "
                    "them too, and virtual is 1"
                )
            if len(stages) != self.virtual:
                raise ValueError(
                    f"virtual is {self.virtual}, but devices {sorted(devices)} have stages "
                    f"{list(stages)}; give every device as many"
                )
            if len({self.stages[s].rows for s in stages}) > 1:
                raise ValueError(
                    f"stages {list(stages)} share devices and must split rows alike: give all the "
                    "same `rows`"
                )

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, virtual ones counted each."""
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        """Number of devices that the plan uses; the world size of its run."""
        return len(self.rank_of_device())

    @property
    def num_layers(self) -> int:
        """Number of layers that the plan covers."""
        return self.stages[-1].stop

    @property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """The stages that share devices, in the order of their first ones.

        Virtual stages i and i + S share them in an interleaved plan; without virtual stages each
        position has one.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for number, stage in enumerate(self.stages):
            found.setdefault(stage.devices, []).append(number)
        return tuple(map(tuple, found.values()))

    def rank_of_device(self) -> dict[int, int]:
        """Ranks are the used devices in ascending order."""
        used = sorted({device for stage in self.stages for device in stage.devices})
        return {device: rank for rank, device in enumerate(used)}
