"""From an engine's times to the spans of a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dapple.costs import PipelineCosts
from dapple.records import Span
from dapple.records.timeline import SpanKind
from dapple.simulator.trace import Trace

_Row = tuple[int, SpanKind, int | None, float, float]
"""Unit, kind, micro-batch, start, end."""


def make_spans(costs: PipelineCosts, trace: Trace, ranks: Sequence[int]) -> tuple[Span, ...]:
    """All spans, by rank and start.

    A message is a send on its sender and a receive on its receiver over the same seconds: what
    overlaps with computing is seen there. A replica without rows has no computations to show.

    Args:
        costs: whose stages and replicas.
        trace: the engine's times.
        ranks: rank of each unit.
    """
    rows = [*_computations(costs, trace), *_messages(costs, trace), *_updates(costs, trace)]
    # Unchecked construction: a large step has a million spans, and their values are our own.
    spans = [
        Span.model_construct(
            rank=ranks[unit],
            stage=costs.stage_of[unit],
            replica=costs.replica_of[unit],
            kind=kind,
            micro_batch=micro_batch,
            start=start,
            end=end,
        )
        for unit, kind, micro_batch, start, end in rows
    ]
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start, span.end)))


def _computations(costs: PipelineCosts, trace: Trace) -> Iterator[_Row]:
    for unit in range(costs.num_units):
        for micro_batch, end in enumerate(trace.forward_end[unit]):
            size = costs.size_of(micro_batch)
            if costs.rows[unit][size]:
                start = max(0.0, end - costs.forward[unit][size])
                yield unit, "forward", micro_batch, start, end
        for micro_batch, end in enumerate(trace.backward_end[unit]):
            size = costs.size_of(micro_batch)
            if costs.rows[unit][size]:
                start = end - costs.backward[unit][size]
                kind: SpanKind = "backward"
                done = trace.weights_end.get((unit, micro_batch))
                if done is not None:
                    kind = "input"
                    start += costs.weights[unit][size]
                    yield (
                        unit,
                        "weight",
                        micro_batch,
                        done - costs.weights[unit][size],
                        done,
                    )
                middle = start + costs.recompute[unit][size]
                if middle > start:
                    yield unit, "recompute", micro_batch, start, middle
                yield unit, kind, micro_batch, middle, end


def _messages(costs: PipelineCosts, trace: Trace) -> Iterator[_Row]:
    for number, channel in enumerate(costs.channels):
        for source, target, messages in (
            (channel.source, channel.target, trace.activations[number]),
            (channel.target, channel.source, trace.gradients[number]),
        ):
            for micro_batch, start, end in messages:
                yield source, "send", micro_batch, start, end
                yield target, "receive", micro_batch, start, end


def _updates(costs: PipelineCosts, trace: Trace) -> Iterator[_Row]:
    for part, (start, end) in zip(costs.sums, trace.sums, strict=True):
        for stage in part.stages:
            for unit in costs.units_of[stage]:
                yield unit, "allreduce", None, start, end
    for unit, end in enumerate(trace.ends):
        if costs.optimizer[unit] > 0:
            yield unit, "optimizer", None, end - costs.optimizer[unit], end
