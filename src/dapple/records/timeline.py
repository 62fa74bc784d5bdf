"""A timeline: what each rank did when, from the simulator and from a run alike."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dapple.records.base import Record

SpanKind = Literal[
    "forward",
    "backward",
    "input",
    "weight",
    "recompute",
    "send",
    "receive",
    "allreduce",
    "optimizer",
    "idle",
]
COMPUTING: tuple[SpanKind, ...] = (
    "forward",
    "backward",
    "input",
    "weight",
    "recompute",
)
"""Kinds that keep a device busy."""


class Span(Record):
    """One activity of one rank; seconds count from the start of the step."""

    rank: int
    stage: int
    replica: int
    kind: SpanKind
    micro_batch: int | None = None
    start: float
    end: float


class Timeline(Record):
    """The spans of one step.

    Attributes:
        step_seconds: from the step's start to the last rank's end, s.
        source: "simulated" or "measured".
        machine_of_rank: machine number of each rank.
        peak_bytes: per rank, the most bytes alive; None where unknown.
        in_flight: per stage, the most micro-batches with forward done and backward not yet.
    """

    format: Literal["dapple-timeline"] = "dapple-timeline"
    version: Literal[1] = 1
    source: Literal["simulated", "measured"] = "simulated"
    step_seconds: float
    spans: tuple[Span, ...] = ()
    machine_of_rank: tuple[int, ...] = ()
    peak_bytes: tuple[int | None, ...] = ()
    in_flight: tuple[int, ...] = Field(default=())

    def busy_seconds(self, rank: int) -> float:
        """Seconds that a rank computes: forwards, backwards in whole or halves, and recompute."""
        return sum(s.end - s.start for s in self.spans if s.rank == rank and s.kind in COMPUTING)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time without compute between the step's start and end."""
        ranks = len(self.machine_of_rank)
        if not ranks or self.step_seconds <= 0:
            return 0.0
        busy = sum(self.busy_seconds(rank) for rank in range(ranks))
        return 1.0 - busy / (ranks * self.step_seconds)
