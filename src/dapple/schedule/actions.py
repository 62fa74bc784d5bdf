"""A schedule: for each stage the order of its computations, written like PyTorch's "2F0"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dapple.errors import ScheduleError

Kind = Literal["F", "B"]
_NOTATION = re.compile(r"(\d+)([FB])(\d+)")


class Action(NamedTuple):
    """One computation: "2F0" is stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read PyTorch's notation.

        Raises:
            ScheduleError: not of the form stage, F or B, micro-batch.
        """
        match = _NOTATION.fullmatch(text.strip())
        if not match:
            raise ScheduleError(f'"{text}" is no action; write it like "2F0" or "2B0"')
        kind: Kind = "F" if match[2] == "F" else "B"
        return cls(int(match[1]), kind, int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """What every stage computes, in order. Transfers follow from it, see docs/semantics.md.

    Attributes:
        name: the schedule's name, such as "early-backward".
        num_micro_batches: M.
        actions: one tuple per stage.
    """

    name: str
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.actions)

    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches whose forward is done and whose backward is not."""
        peaks = []
        for actions in self.actions:
            alive = peak = 0
            for action in actions:
                alive += 1 if action.kind == "F" else -1
                peak = max(peak, alive)
            peaks.append(peak)
        return tuple(peaks)

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, row)) for row in self.actions)
