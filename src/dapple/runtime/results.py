"""What the trainer's methods give, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank.

    Attributes:
        loss: the weighted mean over the global batch; NaN if no row had weight.
        rows: rows of the global batch.
        seconds: time of the step on this rank, s.
        gradient_norm: the norm of the whole model's gradients before clipping; None without
            `clip_norm`, and in a step that only accumulates.
        skipped: gradients overflowed on some rank, so that no rank updated its parameters; only
            with a gradient scaler.
    """

    loss: float
    rows: int
    seconds: float
    gradient_norm: float | None = None
    skipped: bool = False
