"""Why two plans for the same case differ: what each of their steps waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.paper.facts import PaperPlan
from benchmarks.paper.questions import Case
from benchmarks.planner.referee import Judged
from dapple.costs import CostModel
from dapple.records import ModelProfile, StagePlan
from dapple.simulator import step_seconds
from dapple.units import format_bytes

_MUCH_LESS, _LONGER = 0.7, 1.05


class Waits(NamedTuple):
    """Seconds by which a step would be shorter if AllReduces, or transfers, took no time."""

    allreduce: float
    transfers: float


def waits(case: Case, plan: Judged) -> Waits:
    """What of a plan's step is waiting for the network, by simulating it without."""
    profile, found = case.profile, []
    free = {"bytes_per_sample": 0.0, "fixed_bytes": 0.0}
    bare = tuple(n.model_copy(update={"parameter_bytes": 0}) for n in profile.layers)
    unsent = tuple(tensor.model_copy(update=free) for tensor in profile.tensors)
    for update in ({"layers": bare, "tied": ()}, {"tensors": unsent}):
        freed: ModelProfile = profile.model_copy(update=update)
        model = CostModel(freed, case.devices, case.network)
        seconds = step_seconds(model, plan.stages, case.batch, plan.micro_batches)
        found.append(max(0.0, plan.seconds - seconds))
    return Waits(*found)


def sentence(
    case: Case, paper: PaperPlan, ours: Judged, theirs: Judged, moved: Judged | None
) -> str:
    """What sets our plan apart from the paper's.

    Args:
        case: what is planned.
        paper: the paper's plan as its table has it.
        ours, theirs: the two plans, judged.
        moved: the paper's replicas where they are cut best.
    """
    if ours.replicas == theirs.replicas:
        name = case.profile.layers[ours.stages[0].stop - 1].name
        return f"the same replicas, cut after {name}, {_why_there(case, ours, theirs)}"
    parts = []
    if moved is not None:
        parts.append(
            f"{paper.shape} takes {moved.seconds / ours.seconds:.2f}x where it is cut best"
        )
    if paper.shape == "straight":
        parts.append(f"{len(ours.stages)} stages for {len(theirs.stages)} fill and drain sooner")
    mine, other = waits(case, ours), waits(case, theirs)
    parts.append(
        f"of the paper's step {_ms(other.allreduce)} ms are AllReduce and {_ms(other.transfers)} "
        f"transfers that it waits for, of ours {_ms(mine.allreduce)} and {_ms(mine.transfers)}"
    )
    if paper.shape == "straight":
        parts.append(
            f"a device computes {_rows(case, ours)} rows at a time and not {_rows(case, theirs)}"
        )
    return "; ".join(parts)


def _why_there(case: Case, ours: Judged, theirs: Judged) -> str:
    """What our cut of two stages has over the paper's."""
    model = case.problem().model
    moved = [_bytes_per_row(model, plan.stages) for plan in (ours, theirs)]
    if moved[0] < _MUCH_LESS * moved[1]:
        return f"where a row hands over {format_bytes(moved[0])} and not {format_bytes(moved[1])}"
    rows = case.batch / ours.micro_batches
    first, second = (
        sum(model.stage_seconds(s.start, s.stop, rows / s.replicas)) for s in ours.stages
    )
    if first > second * _LONGER:
        return (
            f"so that the first stage takes {first / second:.2f} times as long as the second: with "
            f"{ours.micro_batches} micro-batches the fill and the drain, which the first stage does "
            "not wait for, are much of the step (the uneven split below)"
        )
    return "which balances the stages of our profile"


def _bytes_per_row(model: CostModel, stages: Sequence[StagePlan]) -> int:
    first, second = stages
    crossing = model.crossing((first.start, first.stop), (second.start, second.stop))
    assert crossing is not None
    return round(crossing.bytes_per_row)


def _rows(case: Case, plan: Judged) -> str:
    """Rows of a micro-batch on the device that has most, and on that with fewest."""
    sizes = sorted({-(-case.batch // plan.micro_batches // r) for r in plan.replicas})
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"
