"""The ranks of a timeline, as every drawing shows them: their spans, labels and stages."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence

from dapple.errors import InputError
from dapple.records import Span, Timeline


def spans_of_ranks(timeline: Timeline) -> dict[int, list[Span]]:
    """The spans of each rank that has some, by rank and start.

    Raises:
        InputError: there are none.
    """
    rows = {
        rank: list(spans)
        for rank, spans in itertools.groupby(
            sorted(timeline.spans, key=lambda span: (span.rank, span.start)),
            lambda span: span.rank,
        )
    }
    if not rows:
        raise InputError("the timeline has no spans to draw; simulate with spans=True")
    return rows


def rank_label(rank: int, spans: Sequence[Span]) -> str:
    """A rank by its number, stages and replica, such as "rank  1 stage 0.1"."""
    replica = f".{spans[0].replica}" if spans[0].replica else ""
    stages = sorted({span.stage for span in spans})
    if len(stages) > 1:
        return f"rank {rank:2} stages {','.join(map(str, stages))}{replica}"
    return f"rank {rank:2} stage {stages[0]}{replica}"


def stage_letters(spans: Sequence[Span]) -> dict[int, str]:
    """What marks each stage of a rank; nothing if it is the only one."""
    stages = sorted({span.stage for span in spans})
    if len(stages) == 1:
        return {stages[0]: ""}
    return {stage: string.ascii_lowercase[n % 26] for n, stage in enumerate(stages)}
