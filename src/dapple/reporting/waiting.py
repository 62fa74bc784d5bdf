"""What the ranks of a step did not compute for: the bubble, messages, AllReduces; by stage.

The same for simulated and measured timelines, so that the two can be laid side by side. A rank's
time is split into

    compute     forward, recompute, backward
    messages    waiting for an input whose producer had ended already: exposed communication
    AllReduce   adding up gradients while nothing is computed
    update      the optimizer
    bubble      the rest: waiting for other stages to compute, or for the step to end
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from dapple.records import Span, Timeline
from dapple.units import format_seconds

_COMPUTES = frozenset({"forward", "recompute", "backward", "input", "weight"})
_BACKWARDS = frozenset({"recompute", "backward", "input"})
_ROUNDING = 1e-9


class StageTime(NamedTuple):
    """Seconds of one step, the mean over a stage's ranks."""

    compute: float
    messages: float
    allreduce: float
    update: float
    bubble: float


def stage_times(timeline: Timeline) -> dict[int, StageTime]:
    """How each stage spends a step.

    A wait counts as one for messages from when the last neighbour that has finished before its end
    had finished: with unequal replicas, where some rows come from others, a little too few seconds.

    Args:
        timeline: a step with spans.
    """
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        by_rank[span.rank].append(span)
    ends = _ends(timeline.spans)
    parts: dict[int, list[StageTime]] = defaultdict(list)
    for spans in by_rank.values():
        parts[spans[0].stage].append(_rank_time(spans, ends, timeline.step_seconds))
    return {
        stage: StageTime(*(sum(values) / len(rows) for values in zip(*rows, strict=True)))
        for stage, rows in sorted(parts.items())
    }


def waiting_table(simulated: Timeline | None, measured: Timeline) -> Table:
    """Where each stage's step goes, as shares of the step; simulated / measured.

    Args:
        simulated: None shows the measurement alone.
        measured: the timeline of a run.
    """
    title = "share of the step by stage"
    if simulated is not None:
        title += f": simulated / {measured.source}"
    table = Table(title=escape(title))
    table.add_column("stage", justify="right")
    names = {"allreduce": "AllReduce exposed", "messages": "messages exposed"}
    for field in StageTime._fields:
        table.add_column(names.get(field, field), justify="right")
    found = stage_times(measured)
    expected = stage_times(simulated) if simulated is not None else {}
    for stage, own in found.items():
        cells = []
        for field in StageTime._fields:
            values = [_share(getattr(own, field), measured.step_seconds)]
            if stage in expected and simulated is not None:
                seconds = getattr(expected[stage], field)
                values.insert(0, _share(seconds, simulated.step_seconds))
            cells.append(" / ".join(values))
        table.add_row(str(stage), *cells)
    table.caption = f"{measured.source} step {format_seconds(measured.step_seconds)}"
    return table


def _share(seconds: float, step: float) -> str:
    return f"{100 * seconds / step:.1f} %" if step > 0 else "-"


_Ends = Mapping[tuple[int, bool, int | None], Sequence[float]]


def _ends(spans: Iterable[Span]) -> _Ends:
    """By stage, direction (forward?) and micro-batch, when its replicas had computed, ascending."""
    found: dict[tuple[int, bool, int | None], list[float]] = defaultdict(list)
    for span in spans:
        if span.kind in ("forward", "backward", "input"):
            found[span.stage, span.kind == "forward", span.micro_batch].append(span.end)
    for times in found.values():
        times.sort()
    return found


def _rank_time(spans: Sequence[Span], ends: _Ends, step: float) -> StageTime:
    computing = sorted((s for s in spans if s.kind in _COMPUTES), key=lambda s: (s.start, s.end))
    compute = sum(span.end - span.start for span in computing)
    update = sum(span.end - span.start for span in spans if span.kind == "optimizer")
    messages = free = 0.0
    for span in computing:
        if span.start > free:
            made = _produced(span, ends)
            messages += span.start - max(free, made) if made is not None else 0.0
        free = max(free, span.end)
    busy = [(span.start, span.end) for span in computing]
    reducing = [(span.start, span.end) for span in spans if span.kind == "allreduce"]
    allreduce = _outside(_merged(reducing), _merged(busy))
    bubble = max(0.0, step - compute - messages - allreduce - update)
    return StageTime(compute, messages, allreduce, update, bubble)


def _produced(span: Span, ends: _Ends) -> float | None:
    """When the neighbour that a computation waited for had ended; None: it waited for nobody."""
    forward = span.kind == "forward"
    if not forward and span.kind not in _BACKWARDS:
        return None
    neighbour = span.stage - 1 if forward else span.stage + 1
    times = ends.get((neighbour, forward, span.micro_batch), ())
    before = bisect.bisect_right(times, span.start + _ROUNDING)
    return min(times[before - 1], span.start) if before else None


def _merged(ranges: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _outside(ranges: Sequence[tuple[float, float]], busy: Sequence[tuple[float, float]]) -> float:
    """Seconds of `ranges` in which nothing of `busy` goes on; both merged."""
    total = 0.0
    for start, end in ranges:
        total += end - start
        total -= sum(max(0.0, min(end, b) - max(start, a)) for a, b in busy)
    return total
