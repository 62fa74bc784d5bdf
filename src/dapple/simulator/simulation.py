"""From a plan to the times of one step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from dapple.cluster import Cluster
from dapple.costs import (
    CostModel,
    PipelineCosts,
    merge_equal_replicas,
    pipeline_costs,
    rank_peak_bytes,
)
from dapple.records import (
    ModelProfile,
    Plan,
    Predicted,
    PredictedStage,
    Span,
    StagePlan,
    Timeline,
)
from dapple.schedule import Link, Room, Schedule, check_schedule, make_schedule, schedule_for
from dapple.schedule.table import is_file
from dapple.simulator.events import run_events
from dapple.simulator.rows import run_rows
from dapple.simulator.spans import make_spans
from dapple.simulator.static import run_static
from dapple.simulator.trace import Order, Trace


def step_seconds(
    model: CostModel,
    stages: Sequence[StagePlan],
    global_batch_size: int,
    num_micro_batches: int,
    schedule: str = "early-backward",
) -> float:
    """Seconds of one training step; the fast way, for searches.

    Args:
        model: costs of layers and links; keep one, it caches.
        stages: adjacent stages that cover the profile's layers.
        global_batch_size: rows of a step.
        num_micro_batches: M.
        schedule: one of `dapple.schedule.SCHEDULES`, or the path of a CSV file.

    Raises:
        PlanError: the stages do not fit profile or cluster.
        ScheduleError: the schedule is unknown, or the warm-ups deadlock.
    """
    costs = pipeline_costs(model, stages, global_batch_size, num_micro_batches)
    return run(_merged(costs), schedule).step_seconds


def run(costs: PipelineCosts, schedule: str) -> Trace:
    """Run the step by the engine that fits.

    Where only AllReduces can fill a card, nothing is shared until the first of them starts, and
    the event heap is needed from there on only.
    """
    if not is_plain(costs, schedule):
        return run_rows(costs, *checked_schedule(costs, schedule))
    total = costs.num_micro_batches
    windows = _windows(costs, schedule)
    orders = [_stage_order(schedule, total, warmup) for warmup in costs.warmup]
    if costs.crowded:
        return run_events(costs, orders, windows)
    trace = run_static(costs, orders, windows)
    starts = [
        start
        for part, (start, _) in zip(costs.sums, trace.sums, strict=True)
        if any(
            r.out_card in costs.contended or r.in_card in costs.contended for r in part.ring.between
        )
    ]
    if not starts:
        return trace
    return run_events(costs, orders, windows, trace=trace, since=min(starts))


def simulate(
    plan: Plan,
    profile: ModelProfile,
    *,
    schedule: str | None = None,
    cluster: Cluster | None = None,
    network_model: str | None = None,
    spans: bool = True,
) -> Timeline:
    """Simulate one training step of a plan by the rules of docs/semantics.md.

    Args:
        plan: the plan.
        profile: the profile of its model.
        schedule: another schedule than the plan's.
        cluster: another cluster than the plan's.
        network_model: another network model than the plan's.
        spans: False leaves the spans out, which is faster.

    Raises:
        PlanError: the plan does not fit profile or cluster, or needs what no schedule here does.
        ScheduleError: the schedule is unknown, or the warm-ups deadlock.
    """
    model = _model(plan, profile, cluster, network_model)
    name = schedule or plan.schedule
    costs = _costs(plan, model)
    trace = run(costs, name)
    ranks = _ranks(plan)
    unit_of = {rank: unit for unit, rank in enumerate(ranks)}
    order = [unit_of[rank] for rank in sorted(unit_of)]
    peaks = _peak_bytes(plan, model, costs, name)
    drawn: tuple[Span, ...] = make_spans(costs, trace, ranks) if spans else ()
    return Timeline(
        step_seconds=trace.step_seconds,
        spans=drawn,
        machine_of_rank=tuple(model.network.machine(costs.device_of[unit]) for unit in order),
        peak_bytes=tuple(peaks[unit] for unit in order),
        in_flight=checked_schedule(costs, name)[0].in_flight(),
    )


def schedule_of(
    plan: Plan,
    profile: ModelProfile,
    *,
    schedule: str | None = None,
    cluster: Cluster | None = None,
) -> Schedule:
    """The order of computations of a plan's step.

    Args, Raises: as `simulate`.
    """
    costs = _costs(plan, _model(plan, profile, cluster, None))
    return checked_schedule(costs, schedule or plan.schedule)[0]


def predict(
    plan: Plan,
    profile: ModelProfile,
    *,
    schedule: str | None = None,
    cluster: Cluster | None = None,
    network_model: str | None = None,
) -> Predicted:
    """What the simulator expects of a plan: the record that is saved with it.

    Stage figures are those of the slowest replica and the largest micro-batch; send_seconds is
    the longest message to a later stage and allreduce_seconds the AllReduces, each on its own.

    Args, Raises: as `simulate`.
    """
    model = _model(plan, profile, cluster, network_model)
    name = schedule or plan.schedule
    costs = _costs(plan, model)
    seconds = run(_merged(costs), name).step_seconds
    peaks = _peak_bytes(plan, model, costs, name)
    return Predicted(
        step_seconds=seconds,
        samples_per_second=plan.global_batch_size / seconds if seconds > 0 else 0.0,
        bubble_fraction=_bubble_fraction(costs, seconds),
        stages=tuple(_predicted_stage(costs, s, peaks) for s in range(costs.num_stages)),
    )


@functools.lru_cache(maxsize=4096)
def _stage_order(schedule: str, num_micro_batches: int, warmup: int) -> Order:
    # Every stage's order depends on its own K_i only, so searches ask for the same few.
    (actions,) = make_schedule(schedule, num_micro_batches, (warmup,)).actions
    return tuple(a.micro_batch if a.kind == "F" else ~a.micro_batch for a in actions)


def is_plain(costs: PipelineCosts, schedule: str) -> bool:
    """One stage per device and whole backwards, for which there are faster engines."""
    one_each = len(costs.positions) == costs.num_stages
    return schedule in ("early-backward", "gpipe") and one_each


def checked_schedule(costs: PipelineCosts, name: str) -> tuple[Schedule, Room]:
    """The schedule of a step, and the room for messages that it needs.

    Raises:
        ScheduleError: it is unknown, is not for these stages, or deadlocks.
    """
    if is_file(name):
        schedule = schedule_for(name, costs.num_micro_batches, costs.warmup, costs.positions)
        return schedule, check_schedule(schedule, links=costs.links)
    return _checked(name, costs.num_micro_batches, costs.warmup, costs.positions, costs.links)


@functools.lru_cache(maxsize=256)
def _checked(
    name: str,
    num_micro_batches: int,
    warmup: tuple[int, ...],
    positions: tuple[tuple[int, ...], ...],
    links: tuple[Link, ...],
) -> tuple[Schedule, Room]:
    schedule = schedule_for(name, num_micro_batches, warmup, positions)
    return schedule, check_schedule(schedule, links=links)


def _merged(costs: PipelineCosts) -> PipelineCosts:
    one_each = len(costs.positions) == costs.num_stages
    return merge_equal_replicas(costs) if one_each else costs


def _windows(costs: PipelineCosts, schedule: str) -> Sequence[int]:
    if schedule == "gpipe":
        return [costs.num_micro_batches] * costs.num_stages
    return costs.warmup


def _model(
    plan: Plan, profile: ModelProfile, cluster: Cluster | None, network_model: str | None
) -> CostModel:
    return CostModel(profile, cluster or plan.cluster, network_model or plan.network_model)


def _costs(plan: Plan, model: CostModel) -> PipelineCosts:
    return pipeline_costs(model, plan.stages, plan.global_batch_size, plan.num_micro_batches)


def _ranks(plan: Plan) -> list[int]:
    ranks = plan.rank_of_device()
    return [ranks[device] for stage in plan.stages for device in stage.devices]


def _peak_bytes(
    plan: Plan, model: CostModel, costs: PipelineCosts, schedule: str
) -> list[int | None]:
    made, room = checked_schedule(costs, schedule)
    peaks: list[int | None] = []
    for stage, replica in zip(costs.stage_of, costs.replica_of, strict=True):
        peaks.append(
            rank_peak_bytes(
                model,
                plan.stages,
                made,
                room,
                made.position_of[stage],
                plan.micro_batch_size,
                optimizer_state_factor=plan.optimizer_state_factor,
                replica=replica,
            )
        )
    return peaks


def _bubble_fraction(costs: PipelineCosts, seconds: float) -> float:
    if seconds <= 0:
        return 0.0
    counts = [costs.first_small, costs.num_micro_batches - costs.first_small]
    busy = sum(
        count * (forward + backward)
        for unit in range(costs.num_units)
        for count, forward, backward in zip(
            counts, costs.forward[unit], costs.backward[unit], strict=False
        )
    )
    return 1.0 - busy / (len(set(costs.device_of)) * seconds)


def _predicted_stage(
    costs: PipelineCosts, stage: int, peaks: Sequence[int | None]
) -> PredictedStage:
    units = costs.units_of[stage]
    sends = [
        channel.route.seconds(channel.forward_bytes[0] or 0.0)
        for channel in costs.channels
        if channel.source in units
    ]
    known = [peak for peak in (peaks[unit] for unit in units) if peak is not None]
    return PredictedStage(
        forward_seconds=max(costs.forward[unit][0] for unit in units),
        backward_seconds=max(costs.backward[unit][0] for unit in units),
        send_seconds=max(sends, default=0.0),
        allreduce_seconds=sum(p.ring.seconds(p.size) for p in costs.sums if stage in p.stages),
        peak_bytes=max(known) if len(known) == len(units) else None,
    )
