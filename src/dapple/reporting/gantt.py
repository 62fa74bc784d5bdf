"""Steps drawn by matplotlib: who computes and sends when, and what is held in memory.

    gradients to earlier stages            --
    rank 0 stage 0     [0 ][1 ]        [0   ][2 ]      computations, numbers are micro-batches
    activations to later ones  --  --                  and AllReduces

Only `picture.py` imports this: matplotlib is an extra, and takes a while to load.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dapple.errors import InputError
from dapple.records import Span, Timeline
from dapple.records.timeline import COMPUTING
from dapple.reporting.curves import draw_held, draw_time, lines_of_names
from dapple.reporting.held import held_micro_batches
from dapple.reporting.ranks import rank_label, spans_of_ranks, stage_letters
from dapple.units import format_seconds

# Any: what settings there are depends on the version of matplotlib.
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "font.size": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    # Text stays text, which is small and can be searched; names of parts do not change by chance.
    "svg.fonttype": "none",
    "svg.hashsalt": "dapple",
}
"""Settings of matplotlib for `draw_steps` and for saving what it returns."""


class _Look(NamedTuple):
    """How a kind is drawn: its name, two shades in turn, and the colour of its number."""

    name: str
    shades: tuple[str, str]
    text: str = "white"


_LOOKS = {
    "forward": _Look("forward", ("#2f6db5", "#4b8ad0")),
    "backward": _Look("backward", ("#7cc07a", "#9ad298"), "#15331a"),
    "input": _Look("gradients of inputs", ("#7cc07a", "#9ad298"), "#15331a"),
    "weight": _Look("gradients of weights", ("#4fb3b0", "#77c9c6"), "#0f3332"),
    "recompute": _Look("recompute", ("#f0b840", "#f5cb70"), "#4a3305"),
    "optimizer": _Look("update", ("#c2453e", "#c2453e")),
    "activations": _Look("activations sent", ("#93b9e6", "#b7d2f0")),
    "gradients": _Look("gradients sent", ("#a6d3a3", "#c9e6c7")),
    "allreduce": _Look("AllReduce", ("#8d5fb0", "#8d5fb0")),
}
# Of a row that is one high: half the height of a computation, and where the thin strips lie.
_HALF = 0.29
_STRIP, _GAP = 0.11, 0.025
_ABOVE = (-_HALF - _GAP - _STRIP, _STRIP)
_BELOW = (_HALF + _GAP, _STRIP)

# Inches.
_WIDTH, _LEFT, _INSIDE = 10.0, 1.25, 8.65
_TOP, _TITLE, _ROW, _NAMES, _CURVE, _TIME, _BOTTOM = 0.3, 0.27, 0.36, 0.18, 0.72, 0.3, 0.12
_POINTS = 72
_SMALLEST = 4.5
_MANY_RANKS = 16
_LEAST_STRIP = 5e-4
"""A shorter message, as a share of the time axis, would not be seen."""


def draw_steps(timelines: Mapping[str, Timeline], most_rows: int) -> Figure:
    """A figure of steps one below the other, with one axis of time.

    Args:
        timelines: by title.
        most_rows: of one step.

    Raises:
        InputError: a timeline has no spans, or more rows.
    """
    step = max(_end(timeline) for timeline in timelines.values())
    drawn = {
        title: shown_rows(line, most_rows, _LEAST_STRIP * step) for title, line in timelines.items()
    }
    curves = {title: held_micro_batches(timeline) for title, timeline in timelines.items()}
    most = max(
        (held for c in curves.values() for line in c.values() for _, held in line), default=1
    )
    names = {title: _NAMES * lines_of_names(len(c)) for title, c in curves.items()}
    heights = {t: _TITLE + _ROW * len(r) + names[t] + _CURVE + _TIME for t, r in drawn.items()}
    height = _TOP + sum(heights.values()) + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height))
    top = _TOP
    for title, rows in drawn.items():
        places = (
            (top + _TITLE, _ROW * len(rows)),
            (top + _TITLE + _ROW * len(rows) + names[title], _CURVE),
        )
        gantt, curve = (
            figure.add_axes(
                (_LEFT / _WIDTH, 1 - (start + tall) / height, _INSIDE / _WIDTH, tall / height)
            )
            for start, tall in places
        )
        _draw_rows(gantt, rows, timelines[title].step_seconds, step)
        _draw_titles(gantt, title, timelines[title])
        draw_held(curve, curves[title], timelines[title], most)
        draw_time(curve, step)
        top += heights[title]
    kinds = {kind for rows in drawn.values() for row in rows for kind in row.strips}
    figure.legend(
        handles=[
            Patch(color=look.shades[0], label=look.name)
            for kind, look in _LOOKS.items()
            if kind in kinds
        ],
        loc="upper left",
        bbox_to_anchor=(_LEFT / _WIDTH, 1 - 0.06 / height),
        ncols=len(kinds),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=1.4,
        handletextpad=0.5,
    )
    return figure


class Row(NamedTuple):
    """A rank as it is drawn: its label, and the spans of each kind of `_LOOKS`."""

    label: str
    strips: dict[str, list[Span]]
    letters: dict[int, str]


def shown_rows(timeline: Timeline, most_rows: int, least: float) -> list[Row]:
    """The rows of a step from top to bottom.

    Args:
        timeline: the step.
        most_rows: how many there may be.
        least: seconds; shorter messages are left out.

    Raises:
        InputError: no spans, or too many rows.
    """
    ranks = spans_of_ranks(timeline)
    replicas: dict[int, int] = {}
    for spans in ranks.values():
        replicas[spans[0].stage] = replicas.get(spans[0].stage, 0) + 1
    firsts = len(ranks) > _MANY_RANKS
    if firsts:
        ranks = {rank: spans for rank, spans in ranks.items() if spans[0].replica == 0}
    if len(ranks) > most_rows:
        raise InputError(
            f"{len(ranks)} ranks are too many for a picture of at most {most_rows}; look at them as "
            "a trace (`--trace`)"
        )
    rows = []
    for rank, spans in ranks.items():
        label = " ".join(rank_label(rank, spans).split())
        if firsts and replicas[spans[0].stage] > 1:
            label = f"stage {spans[0].stage}, 1 of {replicas[spans[0].stage]}"
        rows.append(Row(label, _strips(spans, least), stage_letters(spans)))
    return rows


def _strips(spans: Sequence[Span], least: float) -> dict[str, list[Span]]:
    """The spans by how they look; sends are of gradients once the rank's own backward has ended."""
    returned = {
        (span.stage, span.micro_batch): span.end
        for span in spans
        if span.kind in ("backward", "input")
    }
    found: dict[str, list[Span]] = {}
    for span in spans:
        kind: str = span.kind
        if kind == "send":
            end = returned.get((span.stage, span.micro_batch))
            kind = "activations" if end is None or span.start < end else "gradients"
        if kind in _LOOKS and span.end - span.start > (0 if _is_block(kind) else least):
            found.setdefault(kind, []).append(span)
    return found


def _is_block(kind: str) -> bool:
    """A rank does one such thing at a time; the rest overlaps with it."""
    return kind in COMPUTING or kind == "optimizer"


def _end(timeline: Timeline) -> float:
    return (
        max(timeline.step_seconds, max((span.end for span in timeline.spans), default=0.0)) or 1.0
    )


def _draw_rows(axes: Axes, rows: Sequence[Row], end: float, step: float) -> None:
    for number, row in enumerate(rows):
        axes.broken_barh([(0, end)], (number - _HALF, 2 * _HALF), color="#f1f1f1", linewidth=0)
        for kind, spans in row.strips.items():
            strip = _ABOVE if kind == "gradients" else _BELOW
            low, tall = (-_HALF, 2 * _HALF) if _is_block(kind) else strip
            for shade in (0, 1):
                turn = [s for s in spans if (s.micro_batch or 0) % 2 == shade]
                ranges = [(s.start, s.end - s.start) for s in turn]
                if ranges:
                    axes.broken_barh(
                        ranges, (number + low, tall), color=_LOOKS[kind].shades[shade], linewidth=0
                    )
            if _is_block(kind):
                _draw_numbers(axes, number, row, spans, step)
    axes.set_xlim(0, step)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_numbers(axes: Axes, place: int, row: Row, spans: Sequence[Span], step: float) -> None:
    """The micro-batch in the middle of each block of a kind, if there is room in most of them."""
    texts = [
        "" if span.micro_batch is None else f"{span.micro_batch}{row.letters[span.stage]}"
        for span in spans
    ]
    seconds = statistics.median(span.end - span.start for span in spans)
    room = seconds / step * _INSIDE * _POINTS
    size = min(8.0, (room - 1.5) / (0.64 * max(1, *map(len, texts))))
    if size < _SMALLEST:
        return
    for span, text in zip(spans, texts, strict=True):
        if text and span.end - span.start > seconds / 2:
            axes.text(
                (span.start + span.end) / 2,
                place,
                text,
                fontsize=round(size, 1),
                color=_LOOKS[span.kind].text,
                ha="center",
                va="center_baseline",
            )


def _draw_titles(axes: Axes, title: str, timeline: Timeline) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", pad=5)
    figures = (
        f"{timeline.source} step {format_seconds(timeline.step_seconds)}, "
        f"bubble {100 * timeline.bubble_fraction:.1f} %"
    )
    axes.set_title(figures, loc="right", fontsize=8.5, color="#444444", pad=5)
