"""How many micro-batches' activations each stage holds, over a step."""

from __future__ import annotations

from dapple.records import Span, Timeline

Curve = list[tuple[float, int]]
"""(Seconds, number from then on), by time; begins at 0 s."""

_ENDS = frozenset({"backward", "input", "weight"})


def held_micro_batches(timeline: Timeline) -> dict[int, Curve]:
    """Per stage the micro-batches in memory, on the first of its ranks that computes.

    One counts from the start of its forward to the end of its backward, or of its weights where
    the backward is split. With recompute less is kept of each, but the number is the same. The most
    of a curve is what the timeline calls `in_flight`.

    Args:
        timeline: a step with spans.
    """
    rank_of: dict[int, int] = {}
    spans: list[Span] = []
    for span in sorted(timeline.spans, key=lambda span: span.rank):
        computes = span.kind == "forward" or span.kind in _ENDS
        if computes and rank_of.setdefault(span.stage, span.rank) == span.rank:
            spans.append(span)
    # A rank computes one after the other, to rounding: by their middles no two change places.
    spans.sort(key=lambda span: (span.start + span.end, span.kind != "forward"))
    last = {(span.stage, span.micro_batch): span for span in spans}
    curves: dict[int, Curve] = {stage: [(0.0, 0)] for stage in sorted(rank_of)}
    for span in spans:
        if span.kind == "forward":
            _add(curves[span.stage], span.start, 1)
        elif last[span.stage, span.micro_batch] is span:
            _add(curves[span.stage], span.end, -1)
    return curves


def _add(curve: Curve, time: float, change: int) -> None:
    before, held = curve[-1]
    if time <= before:
        curve[-1] = (before, held + change)
    else:
        curve.append((time, held + change))
