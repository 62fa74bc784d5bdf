"""The measured timeline of a step, from what every rank has noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from dapple.records import Plan, Timeline
from dapple.records.timeline import Span


def gathered_timeline(
    spans: Sequence[Span],
    seconds: float,
    peak_bytes: int | None,
    plan: Plan,
    in_flight: tuple[int, ...],
    world_size: int,
) -> Timeline:
    """One timeline of all ranks' spans, in the simulator's format. All ranks call it.

    Args:
        spans: this rank's.
        seconds: its time of the whole step.
        peak_bytes: its peak memory, if it was measured.
        plan: the plan.
        in_flight: per stage the most micro-batches in flight by the schedule.
        world_size: number of ranks.
    """
    row = (list(spans), seconds, peak_bytes)
    rows: list[Any] = [row]
    if world_size > 1:
        rows = [None] * world_size
        dist.all_gather_object(rows, row)
    machine = plan.cluster.machine_of_device()
    used = sorted(plan.rank_of_device())
    return Timeline(
        source="measured",
        step_seconds=max(seconds for _, seconds, _ in rows),
        spans=tuple(span for spans, _, _ in rows for span in spans),
        machine_of_rank=tuple(machine[d] for d in used),
        peak_bytes=tuple(peak for _, _, peak in rows),
        in_flight=in_flight,
    )
