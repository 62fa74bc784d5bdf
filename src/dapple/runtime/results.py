"""What the trainer's methods give, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank.

    Attributes:
        loss: the weighted mean over the global batch; NaN if no row had weight.
        rows: rows of the global batch.
        seconds: time of the step on this rank, s.
        gradient_norm: the norm of the whole model's gradients before clipping; None without
            `clip_norm`, and in a step that only accumulates.
        skipped: no rank updated its parameters, since gradients overflowed on one (with a gradient
            scaler) or no row had weight since the update before.
        metrics: the user's own, weighted means over the global batch; empty unless asked for.
    """

    loss: float
    rows: int
    seconds: float
    gradient_norm: float | None = None
    skipped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Evaluation(float):
    """The loss of a global batch, a number, with the metrics beside it.

    Attributes:
        metrics: the user's own, weighted means over the global batch, by name.
    """

    metrics: Mapping[str, float]

    def __new__(cls, loss: float, metrics: Mapping[str, float] | None = None) -> Evaluation:
        """A loss with metrics."""
        made = super().__new__(cls, loss)
        made.metrics = metrics or {}
        return made

    def __getnewargs__(self) -> tuple[float, Mapping[str, float]]:  # type: ignore[override]
        """For copies in other processes."""
        return float(self), self.metrics
