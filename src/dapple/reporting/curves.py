"""The lower part of a picture: the micro-batches that each stage holds, and the axis of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dapple.records import Timeline
from dapple.reporting.held import Curve
from dapple.units import format_bytes, format_seconds

NAMES_IN_LINE = 4
"""Stages named in a line of the legend."""
_STAGES = ("#1b4f8f", "#c2453e", "#3f8f3c", "#8d5fb0", "#d9902f", "#2b8c8a", "#7a5230", "#d16ba5")
_LEAST = 5e-4
"""Of the step: a value that lasts less would be a spike."""


def draw_held(axes: Axes, curves: Mapping[int, Curve], timeline: Timeline, most: int) -> None:
    """Draw a curve per stage, with its most and the peak bytes that are known of it.

    Args:
        axes: where to draw; whoever draws several steps gives all the same `most`.
        curves: from `held_micro_batches`.
        timeline: the step.
        most: the largest number on the axis.
    """
    peaks = _peaks(timeline)
    for place, (stage, curve) in enumerate(curves.items()):
        # A little apart, so that one line does not hide another.
        offset = 0.05 * most * (0.5 - place / (len(curves) - 1)) if len(curves) > 1 else 0.0
        seen = _seen(curve, _LEAST * timeline.step_seconds)
        times = [time for time, _ in seen] + [timeline.step_seconds]
        held = [number + offset for _, number in seen]
        label = f"stage {stage}: at most {max(number for _, number in curve)}"
        if stage in peaks:
            label += f", peak {format_bytes(peaks[stage])}"
        axes.step(
            times,
            [*held, held[-1]],
            where="post",
            color=_colour(place, len(curves)),
            linewidth=1.2,
            label=label if _is_named(place, len(curves)) else None,
        )
    axes.set_ylim(-0.08 * most, 1.12 * most)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10], integer=True))
    axes.set_ylabel("micro-batches\nheld", fontsize=7.5, rotation=0, ha="right", va="center")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=NAMES_IN_LINE,
        fontsize=7,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.5,
        columnspacing=1.6,
    )


def lines_of_names(num_stages: int) -> int:
    """Lines of the legend: of many stages only the first and the last are named."""
    named = sum(_is_named(place, num_stages) for place in range(num_stages))
    return -(-named // NAMES_IN_LINE)


def _is_named(place: int, num_stages: int) -> bool:
    return num_stages <= len(_STAGES) or place in (0, num_stages - 1)


def _colour(place: int, num_stages: int) -> Any:
    if num_stages <= len(_STAGES):
        return _STAGES[place]
    return colormaps["viridis"](0.9 * place / (num_stages - 1))


def _seen(curve: Curve, least: float) -> Curve:
    """The curve without values that last too shortly to be seen but as a spike."""
    nexts = [time for time, _ in curve[1:]]
    return [
        (time, number)
        for (time, number), after in zip(curve, [*nexts, float("inf")], strict=True)
        if after - time > least
    ]


def _peaks(timeline: Timeline) -> dict[int, int]:
    """Bytes of each stage's fullest rank, where they are known of all its ranks."""
    ranks: dict[int, set[int]] = {}
    for span in timeline.spans:
        ranks.setdefault(span.stage, set()).add(span.rank)
    peaks = {}
    for stage, own in ranks.items():
        found = [
            timeline.peak_bytes[rank] if rank < len(timeline.peak_bytes) else None for rank in own
        ]
        known = [peak for peak in found if peak is not None]
        if len(known) == len(found):
            peaks[stage] = max(known)
    return peaks


def draw_time(axes: Axes, step: float) -> None:
    """Number the axis of time up to `step` seconds."""
    axes.set_xlim(0, step)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda seconds, _: "0" if seconds <= 0 else format_seconds(seconds))
    )
    axes.tick_params(axis="x", length=2.5, labelbottom=True)
