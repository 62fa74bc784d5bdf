"""Plans under schedules that the search itself does not know: zero bubble, virtual stages.

The search finds stages for early backward. These plans, and one stage per device, are put under the
schedule that is wanted, their layers cut anew for virtual stages, and the simulator says which is
fastest of those that fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapple.costs import CostModel, fullest_memory
from dapple.errors import MemoryPlanError, PlanError
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
        stages = cut_anew(model, stages, virtual)
    changes = {"stages": stages, "virtual": virtual, "schedule": schedule, "predicted": None}
    made = Plan.model_validate(plan.model_copy(update=changes).model_dump())
    if virtual > 1:
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


def cut_anew(model: CostModel, stages: Sequence[StagePlan], virtual: int) -> tuple[StagePlan, ...]:
    """The same devices with v stages each: stage i and i + S share those of stage i.

    The layers are cut so that the slowest stage is fastest, devices and replicas considered.

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
    forward, backward = model.layer_seconds(1)
    seconds = [f + b for f, b in zip(forward, backward, strict=True)]
    rates = [sum(model.speeds[device] for device in stage.devices) for stage in stages]
    bounds = _bounds(seconds, [rates[n % len(stages)] for n in range(count)])
    return tuple(
        stages[n % len(stages)].model_copy(update={"start": bounds[n], "stop": bounds[n + 1]})
        for n in range(count)
    )


def _bounds(seconds: Sequence[float], rates: Sequence[float]) -> list[int]:
    """Cuts of a row of layers, so that the largest of (sum / rate) is smallest."""
    layers, parts = len(seconds), len(rates)
    prefix = [0.0]
    for value in seconds:
        prefix.append(prefix[-1] + value)
    infinite = float("inf")
    best = [0.0] + [infinite] * layers
    choices: list[list[int]] = []
    for part, rate in enumerate(rates, start=1):
        after, choice = [infinite] * (layers + 1), [0] * (layers + 1)
        for stop in range(part, layers - (parts - part) + 1):
            for start in range(part - 1, stop):
                worst = max(best[start], (prefix[stop] - prefix[start]) / rate)
                if worst < after[stop]:
                    after[stop], choice[stop] = worst, start
        choices.append(choice)
        best = after
    bounds = [layers]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return bounds[::-1]
