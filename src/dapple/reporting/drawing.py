"""A step as text: one row per rank, time from left to right.

    rank  0 stage 0  0>>1>>.........0<<<<<2>>1<<<<<<...2<<<<<<
    rank  1 stage 1  ...0>>0<<<<<1>>1<<<<<......2>>2<<<<<.....

A block starts with the number of its micro-batch and is filled with the sign of its kind, so that
it can be read without colour and copied into a mail. A block too short for both has its sign only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich.text import Text

from dapple.errors import InputError
from dapple.records import Span, Timeline
from dapple.reporting.ranks import rank_label, spans_of_ranks, stage_letters
from dapple.units import format_seconds

_SIGNS = {
    "forward": ">",
    "backward": "<",
    "input": "<",
    "weight": "w",
    "recompute": "~",
    "allreduce": "=",
    "optimizer": "#",
}
_NAMES = {
    "allreduce": "AllReduce",
    "input": "gradients of inputs",
    "weight": "of weights",
}
_IDLE = "."
# Two shades in turn tell neighbouring micro-batches apart.
_STYLES = {
    "forward": ("white on blue", "white on dodger_blue3"),
    "backward": ("black on green", "black on green3"),
    "input": ("black on green", "black on green3"),
    "weight": ("black on cyan", "black on cyan3"),
    "recompute": ("black on yellow", "black on yellow3"),
    "allreduce": ("white on magenta",),
    "optimizer": ("white on red",),
}
_NARROWEST = 10


def pipeline_drawing(timeline: Timeline, width: int = 100) -> Text:
    """Draw the computations, AllReduces and updates of every rank.

    A column shows what the rank did for most of its time. Transfers are left out: they overlap.

    Args:
        timeline: the step, simulated or measured.
        width: characters of a line.

    Raises:
        InputError: the timeline has no spans, or the width leaves no room.
    """
    rows = spans_of_ranks(timeline)
    labels = {rank: rank_label(rank, spans) for rank, spans in rows.items()}
    margin = max(map(len, labels.values())) + 2
    columns = width - margin
    if columns < _NARROWEST:
        raise InputError(
            f"a drawing {width} wide leaves {columns} columns for the time; "
            f"use at least {margin + _NARROWEST}"
        )
    step = timeline.step_seconds or max(span.end for span in timeline.spans) or 1.0
    text = Text(no_wrap=True)
    for rank, spans in rows.items():
        text.append(labels[rank].ljust(margin))
        letters = stage_letters(spans)
        for block, length in _blocks(spans, columns, step / columns):
            text.append(*_block_text(block, length, letters))
        text.append("\n")
    text.append(_axis(step, columns, margin) + "\n")
    text.append(_legend(timeline, rows, step / columns))
    return text


def _blocks(
    spans: Sequence[Span], columns: int, column_seconds: float
) -> Iterator[tuple[Span | None, int]]:
    """Runs of columns that show the same span; None is idle."""
    picked = _columns([span for span in spans if span.kind in _SIGNS], columns, column_seconds)
    for _, run in itertools.groupby(picked, key=id):
        blocks = list(run)
        yield blocks[0], len(blocks)


def _columns(spans: Sequence[Span], columns: int, seconds: float) -> list[Span | None]:
    """Per column the span that has most of it; None if it is idle for more than half."""
    busy, most = [0.0] * columns, [0.0] * columns
    best: list[Span | None] = [None] * columns
    for span in spans:
        for column in range(
            max(0, int(span.start / seconds)), min(columns, int(span.end / seconds) + 1)
        ):
            start = column * seconds
            overlap = min(span.end, start + seconds) - max(span.start, start)
            busy[column] += max(0.0, overlap)
            if overlap > most[column]:
                best[column], most[column] = span, overlap
    return [b if time >= seconds / 2 else None for b, time in zip(best, busy, strict=True)]


def _block_text(span: Span | None, length: int, letters: dict[int, str]) -> tuple[str, str]:
    if span is None:
        return _IDLE * length, "dim"
    name = "" if span.micro_batch is None else f"{span.micro_batch}{letters[span.stage]}"
    sign = _SIGNS[span.kind]
    # Without a sign behind it, a number could be a forward's or a backward's.
    text = name + sign * (length - len(name)) if len(name) < length else sign * length
    styles = _STYLES[span.kind]
    return text, styles[(span.micro_batch or 0) % len(styles)]


def _axis(step: float, columns: int, margin: int) -> str:
    ticks = max(1, columns // 20)
    line = [" "] * (columns + margin)
    for tick in range(ticks + 1):
        label = "0" if tick == 0 else format_seconds(step * tick / ticks)
        end = margin + round(columns * tick / ticks)
        start = margin if tick == 0 else end - len(label)
        line[start : start + len(label)] = label
    return "".join(line).rstrip()


def _legend(timeline: Timeline, rows: dict[int, list[Span]], column_seconds: float) -> str:
    used = {span.kind for spans in rows.values() for span in spans}
    if any(len(stage_letters(spans)) > 1 for spans in rows.values()):
        used_letters = "a, b, .. stages of a rank"
    else:
        used_letters = ""
    signs = [f"{sign} {_NAMES.get(k, k)}" for k, sign in _SIGNS.items() if k in used]
    step = f"{timeline.source} step {format_seconds(timeline.step_seconds)}"
    bubble = f"bubble {100 * timeline.bubble_fraction:.1f} %"
    column = f"one column {format_seconds(column_seconds)}"
    return (
        ", ".join([*signs, f"{_IDLE} idle", *([used_letters] if used_letters else [])])
        + "\n"
        + "; ".join([step, bubble, column])
    )
