"""Why a plan was chosen, in words and numbers."""

from __future__ import annotations

from dapple.records.base import Record
from dapple.units import format_seconds


class Alternative(Record):
    """A plan that was not chosen.

    Attributes:
        name: what it is, such as "one stage fewer".
        step_seconds: its simulated step; None: it does not exist or does not fit.
        reason: the plan in words, or why there is none.
    """

    name: str
    step_seconds: float | None = None
    reason: str


class Explanation(Record):
    """Why a plan was chosen.

    Attributes:
        step_seconds: the plan's simulated step.
        binding: what the step depends on, strongest first, in words.
        alternatives: what else there was.
    """

    step_seconds: float
    binding: tuple[str, ...]
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        lines = [f"step {format_seconds(self.step_seconds)}; it depends on:"]
        lines += [f"  {what}" for what in self.binding]
        lines.append("instead of it:")
        for other in self.alternatives:
            if other.step_seconds is None:
                lines.append(f"  {other.name}: {other.reason}")
            else:
                ratio = (
                    f", {other.step_seconds / self.step_seconds:.3f}x" if self.step_seconds else ""
                )
                lines.append(
                    f"  {other.name}: {format_seconds(other.step_seconds)}{ratio} ({other.reason})"
                )
        return "\n".join(lines)
