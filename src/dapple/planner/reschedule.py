"""Plans under schedules that the search itself does not know: zero bubble, virtual stages.

A plan for early backward is put under the schedule that is wanted, its layers cut anew for virtual
stages, and the simulator says what it takes. `dapple.planner.under` looks for the best of many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dapple.costs import CostModel, fullest_memory, split_rows
from dapple.errors import MemoryPlanError, PlanError
from dapple.planner.traffic import Floats
from dapple.records import ModelProfile, Plan, StagePlan
from dapple.schedule import schedule_for
from dapple.simulator import predict
from dapple.units import format_bytes

RESCHEDULED = ("interleaved", "zero-bubble")
"""Schedules that plans of the search are put under."""


def rescheduled(plan: Plan, profile: ModelProfile, schedule: str, virtual: int = 1) -> Plan:
    """A plan's devices and micro-batches under another schedule, predicted anew.

    Args:
        plan: a plan with one stage per device.
        profile: the profile of its model.
        schedule: the schedule.
        virtual: stages per device; the layers are cut anew, see `cut_anew`.

    Raises:
        PlanError: there are fewer layers than stages.
        MemoryPlanError: some device would need more memory than it has.
        ScheduleError: the schedule has no use for virtual stages.
    """
    stages = plan.stages
    if virtual > 1:
        model = CostModel(profile, plan.cluster, plan.network_model)
        stages = cut_anew(model, stages, virtual, plan.micro_batch_size)
    return scheduled(plan, profile, stages, schedule, virtual)


def scheduled(
    plan: Plan,
    profile: ModelProfile,
    stages: tuple[StagePlan, ...],
    schedule: str,
    virtual: int = 1,
) -> Plan:
    """A plan with these stages under a schedule, predicted anew.

    Args, Raises: as `rescheduled`; the stages are final.
    """
    changes = {"stages": stages, "virtual": virtual, "schedule": schedule, "predicted": None}
    made = Plan.model_validate(plan.model_copy(update=changes).model_dump())
    if virtual > 1 or schedule == "gpipe":
        # K_i follows from the order here; it is in the plan for its readers.
        warmup = [stage.warmup for stage in made.stages]
        order = schedule_for(schedule, made.num_micro_batches, warmup, made.positions)
        pairs = zip(made.stages, order.in_flight(), strict=True)
        stages = tuple(stage.model_copy(update={"warmup": k}) for stage, k in pairs)
        made = made.model_copy(update={"stages": stages})
    predicted = predict(made, profile)
    for number, (stage, figures) in enumerate(zip(made.stages, predicted.stages, strict=True)):
        least = fullest_memory(made.cluster, stage)
        if figures.peak_bytes is not None and figures.peak_bytes > least:
            raise MemoryPlanError(
                f"under {schedule} stage {number} needs {format_bytes(figures.peak_bytes)} of "
                f"{format_bytes(least)}; take early-backward, or devices with more memory"
            )
    return made.model_copy(update={"predicted": predicted})


def cut_anew(
    model: CostModel, stages: Sequence[StagePlan], virtual: int, micro_batch_rows: int
) -> tuple[StagePlan, ...]:
    """The same devices with v stages each: stage i and i + S share those of stage i.

    The layers are cut so that the slowest stage is fastest, devices and replicas considered. No
    stage shares out its optimizer's state: the runtime knows that for one stage per device only.

    Args:
        model: costs of the layers.
        stages: one per set of devices.
        virtual: v.
        micro_batch_rows: rows of the largest micro-batch, before the replica split.

    Raises:
        PlanError: there are fewer layers than stages, or they recompute ranges of layers.
    """
    layers, count = stages[-1].stop, len(stages) * virtual
    if count > layers:
        raise PlanError(
            f"{virtual} stages on each of {len(stages)} positions need {count} layers, but the model "
            f"has {layers}; use fewer virtual stages"
        )
    if any(isinstance(stage.recompute, tuple) and stage.recompute for stage in stages):
        raise PlanError(
            "the plan recomputes ranges of layers, which virtual stages would cut apart; recompute "
            "whole stages"
        )
    seconds = [_layer_seconds(model, stage, micro_batch_rows) for stage in stages]
    bounds = _bounds([seconds[n % len(stages)] for n in range(count)])
    return tuple(
        stages[n % len(stages)].model_copy(
            update={"start": bounds[n], "stop": bounds[n + 1], "shard": "none"}
        )
        for n in range(count)
    )


def _layer_seconds(model: CostModel, stage: StagePlan, micro_batch_rows: int) -> Floats:
    """Forward and backward seconds of every layer on a stage's devices, on the slowest replica."""
    rows = split_rows(micro_batch_rows, stage.replicas, stage.rows)
    shares = {(n, model.speeds[device]) for n, device in zip(rows, stage.devices, strict=True)}
    both = [np.sum(model.layer_seconds(n), axis=0) / speed for n, speed in shares]
    slowest: Floats = np.max(both, axis=0)
    return slowest


def _bounds(seconds: Sequence[Floats]) -> list[int]:
    """Cuts of a row of layers into one part for each of the lists, so that the slowest is fastest.

    Args:
        seconds: per part, what each of the layers would take there.
    """
    layers = len(seconds[0])
    best = np.where(np.arange(layers + 1) == 0, 0.0, np.inf)
    choices = []
    for part in seconds:
        prefix = np.concatenate([[0.0], np.cumsum(part)])
        worst = np.maximum(best[:, None], prefix[None, :] - prefix[:, None])
        worst[np.tril_indices(layers + 1)] = np.inf  # at least one layer
        choices.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    bounds = [layers]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return bounds[::-1]
