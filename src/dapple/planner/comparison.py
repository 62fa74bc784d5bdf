"""All planners side by side on the same input, judged by the same simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dapple.cluster import Cluster
from dapple.costs import CostModel
from dapple.errors import MemoryPlanError, PlanError
from dapple.planner.baselines import data_parallel
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.reschedule import rescheduled
from dapple.planner.search import PLANNERS, search
from dapple.records import ModelProfile, Plan
from dapple.simulator import predict, step_seconds

NO_OVERLAP = "dp-no-overlap"


@dataclass(frozen=True)
class Compared:
    """What one planner came to.

    Attributes:
        planner: its name.
        plan: its best plan, predicted; None: refused.
        refused: why there is none.
        exposed_allreduce_seconds: how much shorter the step would be if AllReduces took no time.
        exposed_transfer_seconds: how much shorter it would be if transfers between stages took no
            time. The two may overlap.
        note: what sets the row apart, such as that it is not a plan that can be run.
    """

    planner: str
    plan: Plan | None = None
    refused: str | None = None
    exposed_allreduce_seconds: float = 0.0
    exposed_transfer_seconds: float = 0.0
    note: str = ""

    @property
    def step_seconds(self) -> float | None:
        """The simulated step; None: refused."""
        predicted = self.plan.predicted if self.plan else None
        return predicted.step_seconds if predicted else None

    @property
    def peak_bytes(self) -> int | None:
        """Memory of the fullest device; None: refused, or not known."""
        stages = self.plan.predicted.stages if self.plan and self.plan.predicted else ()
        known = [stage.peak_bytes for stage in stages if stage.peak_bytes is not None]
        return max(known) if known and len(known) == len(stages) else None


def compare(
    profile: ModelProfile,
    cluster: Cluster,
    global_batch_size: int,
    *,
    micro_batch_size: int | None = None,
    optimizer: str = "adamw",
    network_model: str | None = None,
) -> tuple[Compared, ...]:
    """Every planner's best plan, the shortest step first, refused ones last.

    Each may choose its number of micro-batches and its warm-up; "gpipe" and "torchgpipe" run
    GPipe's schedule, the others early backward. "dp-no-overlap" is what "dp" takes if gradients
    are added up after the last backward, as one AllReduce (DAPPLE, section 6): a figure, no plan.

    Args:
        profile: the model's costs.
        cluster: the devices.
        global_batch_size: rows of a step, >= 1.
        micro_batch_size: rows of a micro-batch before the replica split; None: each chooses.
        optimizer: "adamw", "sgd", ...; its state counts against the memory.
        network_model: "shared" or "paper"; None: the cluster's.

    Raises:
        InputError: an unknown name, or a batch size out of range.
    """
    options: dict[str, Any] = {
        "micro_batch_size": micro_batch_size,
        "optimizer": optimizer,
        "network_model": network_model,
    }
    rows = [_row(name, profile, cluster, global_batch_size, options) for name in PLANNERS]
    problem = Problem(profile, cluster, global_batch_size, **options)
    rows.append(_no_overlap_row(problem))
    rows += _under_other_schedules(rows[0], profile)
    order = {row.planner: n for n, row in enumerate(rows)}

    def rank(row: Compared) -> tuple[float, int]:
        return row.step_seconds if row.step_seconds is not None else float("inf"), order[
            row.planner
        ]

    return tuple(sorted(rows, key=rank))


def _row(
    planner: str, profile: ModelProfile, cluster: Cluster, batch: int, options: dict[str, Any]
) -> Compared:
    try:
        plan = search(profile, cluster, batch, planner=planner, **options).plan
    except MemoryPlanError as error:
        return Compared(planner, refused=str(error))
    return _exposed(planner, plan, profile)


def _under_other_schedules(row: Compared, profile: ModelProfile) -> list[Compared]:
    """A row's stages and micro-batches under the other schedules, where they fit."""
    if row.plan is None or row.plan.num_stages == 1:
        return []
    rows = []
    for schedule, virtual in (("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)):
        name = f"{row.planner}:{schedule}"
        try:
            plan = rescheduled(row.plan, profile, schedule, virtual)
        except PlanError:
            continue
        note = "the same stages" if virtual == 1 else "the same devices, layers cut anew"
        rows.append(_exposed(name, plan, profile, f"{note}, {schedule}"))
    return rows


def _exposed(name: str, plan: Plan, profile: ModelProfile, note: str = "") -> Compared:
    """A plan with what of its step is neither computing nor waiting for that."""
    assert plan.predicted is not None, "a plan to compare is predicted"
    seconds = plan.predicted.step_seconds
    without = [max(0.0, seconds - _seconds(plan, other)) for other in _freed(profile)]
    return Compared(
        name,
        plan,
        exposed_allreduce_seconds=without[0],
        exposed_transfer_seconds=without[1],
        note=note,
    )


def _freed(profile: ModelProfile) -> Iterator[ModelProfile]:
    """The profile without gradients to add up, and without bytes between layers."""
    layers = [layer.model_copy(update={"parameter_bytes": 0}) for layer in profile.layers]
    yield profile.model_copy(update={"layers": tuple(layers), "tied": ()})
    nothing = {"bytes_per_sample": 0.0, "fixed_bytes": 0.0}
    tensors = [tensor.model_copy(update=nothing) for tensor in profile.tensors]
    yield profile.model_copy(update={"tensors": tuple(tensors)})


def _seconds(plan: Plan, profile: ModelProfile) -> float:
    model = CostModel(profile, plan.cluster, plan.network_model)
    return step_seconds(
        model, plan.stages, plan.global_batch_size, plan.num_micro_batches, plan.schedule
    )


def _no_overlap_row(problem: Problem) -> Compared:
    found = [
        without_overlap(problem, layout)
        for count in problem.micro_batch_counts
        for layout in data_parallel(problem, count)
    ]
    fitting = [(seconds, n) for n, (seconds, _) in enumerate(found) if seconds is not None]
    if not fitting:
        reasons = [fit for _, fit in found if isinstance(fit, Refusal)]
        return Compared(NO_OVERLAP, refused=str(min(reasons, key=lambda r: r.excess)))
    seconds, number = min(fitting)
    plan = found[number][1]
    assert isinstance(plan, Plan)
    predicted = predict(plan, problem.profile)
    busy = (1 - predicted.bubble_fraction) * predicted.step_seconds
    figures = {
        "step_seconds": seconds,
        "samples_per_second": plan.global_batch_size / seconds if seconds > 0 else 0.0,
        "bubble_fraction": 1 - busy / seconds if seconds > 0 else 0.0,
    }
    (freed, _) = _freed(problem.profile)
    return Compared(
        NO_OVERLAP,
        plan.model_copy(update={"predicted": predicted.model_copy(update=figures)}),
        exposed_allreduce_seconds=max(0.0, seconds - _seconds(plan, freed)),
        note="a figure: the runtime adds gradients up during the last backward",
    )


def without_overlap(problem: Problem, layout: Layout) -> tuple[float, Plan] | tuple[None, Refusal]:
    """The step of a layout whose AllReduces start after the last backward, and its plan."""
    stages = problem.fit(layout, NO_OVERLAP)
    if isinstance(stages, Refusal):
        return None, stages
    network = problem.model.network.model
    model = CostModel(problem.profile, problem.cluster, network, overlap=False)
    batch, count = problem.global_batch_size, layout.micro_batches
    seconds = step_seconds(model, stages, batch, count, problem.schedule)
    return seconds, problem.plan(layout, stages, NO_OVERLAP)
