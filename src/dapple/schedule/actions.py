"""A schedule: for each position the order of its computations, written like PyTorch's "2F0"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from dapple.errors import ScheduleError

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; its two halves: gradients of the inputs, gradients of the weights."""

KINDS: tuple[Kind, ...] = get_args(Kind)
_NOTATION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


class Action(NamedTuple):
    """One computation: "2F0" is stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def returns(self) -> bool:
        """It makes the gradients of the stage's inputs."""
        return self.kind in ("B", "I")

    @property
    def frees(self) -> bool:
        """After it nothing is kept of the micro-batch in this stage."""
        return self.kind in ("B", "W")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read PyTorch's notation.

        Raises:
            ScheduleError: not of the form stage, F, B, I or W, micro-batch.
        """
        match = _NOTATION.fullmatch(text.strip())
        if not match:
            raise ScheduleError(
                f'"{text}" is no action; write it like "2F0", "2B0", "2I0" or "2W0"'
            )
        kind = next(kind for kind in KINDS if kind == match[2])
        return cls(int(match[1]), kind, int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """What every position of the pipeline computes, in order.

    A position is the devices of one stage, or of several virtual stages that share devices.
    Transfers follow from the order, see docs/semantics.md.

    Attributes:
        name: the schedule's name, such as "early-backward".
        num_micro_batches: M.
        actions: one tuple per position.
    """

    name: str
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Per position its stages, ascending."""
        return tuple(tuple(sorted({a.stage for a in row})) for row in self.actions)

    @cached_property
    def position_of(self) -> dict[int, int]:
        """The position of each stage."""
        return {s: position for position, row in enumerate(self.stages) for s in row}

    @property
    def num_positions(self) -> int:
        """Number of positions."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of stages of all positions."""
        return len(self.position_of)

    @property
    def splits_backward(self) -> bool:
        """Some gradients of weights are computed apart from those of the inputs."""
        return any(action.kind == "W" for row in self.actions for action in row)

    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches whose forward is done and whose backward is not.

        A micro-batch is in flight until its weight gradients are done.
        """
        alive = dict.fromkeys(sorted(self.position_of), 0)
        peaks = dict(alive)
        for row in self.actions:
            for action in row:
                stage = action.stage
                if action.kind == "F":
                    alive[stage] += 1
                    peaks[stage] = max(peaks[stage], alive[stage])
                elif action.frees:
                    alive[stage] -= 1
        return tuple(peaks.values())

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, row)) for row in self.actions)
