"""All planners side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from dapple.planner import Compared
from dapple.records import Plan, Predicted
from dapple.units import format_bytes, format_seconds

_MANY = 5
_COLUMNS = (
    "M x rows",
    "step",
    "ratio",
    "samples/s",
    "bubble",
    "memory",
    "AllReduce",
    "transfers",
)


def comparison_table(rows: Sequence[Compared], title: str) -> Table:
    """Planners from the shortest step to the refused; the ratio is to dapple's own step.

    AllReduce and transfers are what of them the step waits for. Memory is the fullest device's.
    M x rows: micro-batches and their size.
    """
    caption = escape(_caption(rows))
    table = Table(title=escape(title), caption=caption, caption_justify="left", box=SIMPLE)
    table.add_column("planner", no_wrap=True)
    table.add_column("plan")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    ours = {row.planner: row.step_seconds for row in rows}.get("dapple")
    for row in rows:
        name = escape(row.planner + (" *" if row.note else ""))
        if row.plan is None or row.plan.predicted is None:
            table.add_row(name, "refused", *["-"] * len(_COLUMNS))
        else:
            cells = _figures(row, row.plan, row.plan.predicted, ours)
            table.add_row(name, escape(plan_shape(row.plan)), *cells)
    return table


def plan_shape(plan: Plan) -> str:
    """A plan in a few words: replicas of each stage, and how many layers each holds.

    One stage is "DP on 8"; sixteen stages of one device "straight on 16"; two stages of eight
    devices "8:8, layers 24:24"; of many stages only their number and all devices are told.
    """
    replicas = [stage.replicas for stage in plan.stages]
    if len(replicas) == 1:
        return f"DP on {replicas[0]}" if replicas[0] > 1 else "one device"
    if len(replicas) > _MANY:
        if max(replicas) == 1:
            return f"straight on {len(replicas)}"
        return f"{len(replicas)} stages on {sum(replicas)}"
    layers = ":".join(str(stage.stop - stage.start) for stage in plan.stages)
    return f"{':'.join(map(str, replicas))}, layers {layers}"


def _figures(row: Compared, plan: Plan, predicted: Predicted, ours: float | None) -> list[str]:
    step = predicted.step_seconds
    waits = (row.exposed_allreduce_seconds, row.exposed_transfer_seconds)
    return [
        f"{plan.num_micro_batches} x {plan.micro_batch_size}",
        format_seconds(step),
        f"{step / ours:.3f}" if ours else "-",
        f"{predicted.samples_per_second:.4g}",
        f"{100 * predicted.bubble_fraction:.1f} %",
        "unknown" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        *("-" if seconds <= 0 else format_seconds(seconds) for seconds in waits),
    ]


def _caption(rows: Sequence[Compared]) -> str:
    lines = [f"* {row.planner}: {row.note}" for row in rows if row.note]
    lines += [f"{row.planner}: {row.refused}" for row in rows if row.refused]
    plans = [row.plan for row in rows if row.plan is not None]
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])
