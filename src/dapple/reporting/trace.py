"""Timelines as Chrome traces, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Trace Event Format: complete events (ph X) on a thread must nest, so what overlaps with computing,
transfers and AllReduces, are asynchronous events (ph b and e) on tracks of their own.
"""

from __future__ import annotations

from typing import Any

from dapple.records import Span, Timeline

_OVERLAPPING = ("send", "receive", "allreduce")


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the trace event format: process = machine, thread = rank, times in us."""
    events = _names(timeline)
    for number, span in enumerate(timeline.spans):
        events += _events(timeline, span, number)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source, "step_seconds": timeline.step_seconds},
    }


def _names(timeline: Timeline) -> list[dict[str, Any]]:
    stages: dict[int, set[int]] = {}
    replicas: dict[int, int] = {}
    for span in timeline.spans:
        stages.setdefault(span.rank, set()).add(span.stage)
        replicas[span.rank] = span.replica
    ranks = sorted({*stages, *range(len(timeline.machine_of_rank))})
    events = [
        _metadata("process_name", machine, 0, f"machine {machine}")
        for machine in sorted({_machine(timeline, rank) for rank in ranks})
    ]
    for rank in ranks:
        stage = ", ".join(map(str, sorted(stages.get(rank, ())))) or "-"
        name = f"rank {rank} (stage {stage}, replica {replicas.get(rank, '-')})"
        events.append(_metadata("thread_name", _machine(timeline, rank), rank, name))
    return events


def _metadata(kind: str, machine: int, rank: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": machine, "tid": rank, "args": {"name": name}}


def _machine(timeline: Timeline, rank: int) -> int:
    known = timeline.machine_of_rank
    return known[rank] if rank < len(known) else 0


def _events(timeline: Timeline, span: Span, number: int) -> list[dict[str, Any]]:
    name = span.kind if span.micro_batch is None else f"{span.kind} {span.micro_batch}"
    event = {
        "name": name,
        "cat": span.kind,
        "pid": _machine(timeline, span.rank),
        "tid": span.rank,
        "ts": span.start * 1e6,
        "args": {
            "stage": span.stage,
            "replica": span.replica,
            "micro_batch": span.micro_batch,
        },
    }
    if span.kind not in _OVERLAPPING:
        return [{**event, "ph": "X", "dur": (span.end - span.start) * 1e6}]
    return [
        {**event, "ph": "b", "id": number},
        {**event, "ph": "e", "id": number, "ts": span.end * 1e6},
    ]
