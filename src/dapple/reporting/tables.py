"""Tables for the terminal: a plan, and what was predicted against what was measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from dapple.costs import fullest_memory
from dapple.errors import PlanError
from dapple.records import Plan, Predicted, PredictedStage, StagePlan, Timeline
from dapple.units import format_bytes, format_seconds


def plan_table(plan: Plan) -> Table:
    """A plan, one row per stage, with what each is expected to take and to hold.

    Seconds are those of one micro-batch on the slowest replica; AllReduce is once per step.
    Memory is the fullest device's, against what it has.
    """
    table = Table(title=_title(plan), caption=_caption(plan), caption_justify="left")
    for name in ("stage", "layers", "devices", "in flight"):
        table.add_column(name, justify="right" if name != "devices" else "left")
    figures = _stage_predictions(plan, plan.predicted)
    for name in ("forward", "backward", "send", "AllReduce", "memory") if figures else ():
        table.add_column(name, justify="right")
    for number, stage in enumerate(plan.stages):
        cells = [str(number), _layers(stage), _devices(plan, stage), str(stage.warmup)]
        if figures:
            cells += _stage_figures(plan, stage, figures[number])
        table.add_row(*cells)
    return table


class Figure(NamedTuple):
    """One figure, predicted and measured; None: not known.

    Attributes:
        name: what it is, such as "step" or "stage 0 peak memory".
        unit: "s", "bytes" or "share".
    """

    name: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def difference(self) -> float | None:
        """How far the prediction is from the measurement, as a share of the measurement.

        Shares are subtracted. None: a figure is missing, or the measurement is zero.
        """
        if self.predicted is None or self.measured is None:
            return None
        if self.unit == "share":
            return self.predicted - self.measured
        return self.predicted / self.measured - 1 if self.measured else None


def compared_figures(
    plan: Plan, measured: Timeline, predicted: Predicted | None = None
) -> tuple[Figure, ...]:
    """Step, bubble, and peak memory of each stage, predicted and measured.

    Args:
        plan: the plan that was run.
        measured: the timeline of the run; a stage's peak is that of its fullest rank.
        predicted: None takes the plan's own prediction.

    Raises:
        PlanError: there is no prediction to compare with.
    """
    predicted = predicted or plan.predicted
    if predicted is None:
        raise PlanError("the plan holds no prediction; make it with `dapple plan`, or simulate it")
    ranks = plan.rank_of_device()
    stages = _stage_predictions(plan, predicted)
    figures = [
        Figure("step", "s", predicted.step_seconds, measured.step_seconds),
        Figure("bubble", "share", predicted.bubble_fraction, measured.bubble_fraction),
    ]
    for number, stage in enumerate(plan.stages):
        peaks = [_at(measured.peak_bytes, ranks[device]) for device in stage.devices]
        known = [peak for peak in peaks if peak is not None]
        expected = stages[number].peak_bytes if stages else None
        peak = max(known) if len(known) == len(peaks) else None
        figures.append(Figure(f"stage {number} peak memory", "bytes", expected, peak))
    return tuple(figures)


def predicted_against_measured(
    plan: Plan, measured: Timeline, predicted: Predicted | None = None
) -> Table:
    """The figures of `compared_figures` as a table, with the difference in percent."""
    table = Table(title=escape(f"{plan.model}: predicted against {measured.source}"))
    table.add_column("")
    for name in ("predicted", measured.source, "difference"):
        table.add_column(name, justify="right")
    for figure in compared_figures(plan, measured, predicted):
        values = (_value(value, figure.unit) for value in (figure.predicted, figure.measured))
        table.add_row(figure.name, *values, _difference(figure))
    return table


def _stage_predictions(plan: Plan, predicted: Predicted | None) -> tuple[PredictedStage, ...]:
    """One prediction per stage, or none: a plan that was edited by hand may hold too few."""
    stages = predicted.stages if predicted else ()
    return stages if len(stages) == plan.num_stages else ()


def _at(values: Sequence[int | None], index: int) -> int | None:
    return values[index] if index < len(values) else None


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "share":
        return f"{100 * value:.1f} %"
    return format_seconds(value) if unit == "s" else format_bytes(value)


def _difference(figure: Figure) -> str:
    if figure.difference is None:
        return "-"
    return f"{100 * figure.difference:+.1f} {'points' if figure.unit == 'share' else '%'}"


def _title(plan: Plan) -> str:
    return escape(
        f"{plan.model}: {plan.global_batch_size} samples in {plan.num_micro_batches} micro-batches "
        f"of {plan.micro_batch_size}, {plan.schedule}, on {plan.cluster.name}"
    )


def _caption(plan: Plan) -> str:
    lines = []
    if plan.predicted:
        lines.append(_expectation(plan.predicted))
    lines += [f"note: {note}" for note in plan.notes]
    if plan.simulate_only:
        lines.append(f"can be simulated only, because of: {', '.join(plan.simulate_only)}")
    return escape("\n".join(lines))


def _expectation(predicted: Predicted) -> str:
    parts = [
        f"step {format_seconds(predicted.step_seconds)}",
        f"{predicted.samples_per_second:.4g} samples/s",
        f"bubble {100 * predicted.bubble_fraction:.1f} %",
    ]
    bound = predicted.lower_bound_seconds
    if bound:
        gap = 100 * (predicted.step_seconds / bound - 1)
        parts.append(f"at most {gap:.1f} % above the best possible")
    return "expected: " + ", ".join(parts)


def _layers(stage: StagePlan) -> str:
    count = stage.stop - stage.start
    return f"{stage.start}-{stage.stop - 1} ({count})" if count > 1 else f"{stage.start} (1)"


def _devices(plan: Plan, stage: StagePlan) -> str:
    """Devices by machine, runs shortened: "0-7", or "0-3 | 8-11" over two machines.

    With shares of the rows: "0-7 (8), rows 4 x 3, 4 x 1".
    """
    machine_of = plan.cluster.machine_of_device()
    parts = [
        ",".join(_ranges(devices))
        for _, devices in itertools.groupby(stage.devices, key=lambda device: machine_of[device])
    ]
    shown = " | ".join(parts) + (f" ({stage.replicas})" if stage.replicas > 1 else "")
    if stage.rows is None:
        return shown
    runs = [(len(list(run)), share) for share, run in itertools.groupby(stage.rows)]
    shares = ", ".join(f"{n} x {share:g}" if n > 1 else f"{share:g}" for n, share in runs)
    return f"{shown}, rows {shares}"


def _ranges(numbers: Iterable[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def _stage_figures(plan: Plan, stage: StagePlan, figures: PredictedStage) -> list[str]:
    peak = "unknown"
    if figures.peak_bytes is not None:
        memory = fullest_memory(plan.cluster, stage)
        peak = f"{format_bytes(figures.peak_bytes)} of {format_bytes(memory)}"
    seconds = (
        figures.forward_seconds,
        figures.backward_seconds,
        figures.send_seconds,
        figures.allreduce_seconds,
    )
    return [*("-" if value == 0 else format_seconds(value) for value in seconds), peak]
