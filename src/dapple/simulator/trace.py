"""What an engine found out: the times of every computation, transfer and AllReduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dapple.costs import GradientSum, PipelineCosts
from dapple.errors import ScheduleError

Order = tuple[int, ...]
"""Computations of a stage in order: m is the forward of micro-batch m, ~m its backward."""


Message = tuple[int, float, float]
"""Micro-batch, start and end of a transfer, in seconds from the step's start."""


@dataclass(slots=True)
class Trace:
    """Times in seconds from the step's start.

    Attributes:
        forward_end, backward_end: per unit and micro-batch; a computation starts at its end
            less its seconds. Of a split backward, the end of its first half.
        weights_end: per unit and micro-batch the end of its weight gradients, where split.
        activations, gradients: per channel its messages in order.
        sums: start and end of each AllReduce of the costs.
        ends: per unit, the end of its optimizer update.
    """

    forward_end: list[list[float]]
    backward_end: list[list[float]]
    activations: list[list[Message]]
    gradients: list[list[Message]]
    sums: list[tuple[float, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    weights_end: dict[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, costs: PipelineCosts) -> Trace:
        """A trace with nothing in it yet."""
        units, channels = range(costs.num_units), costs.channels
        return cls(
            [[] for _ in units], [[] for _ in units], [[] for _ in channels], [[] for _ in channels]
        )

    @property
    def step_seconds(self) -> float:
        """When the last unit has updated its parameters."""
        return max(self.ends)

    def finish(self, costs: PipelineCosts) -> None:
        """Fill in the optimizer updates from the last backwards and the AllReduces (rule 8)."""
        last = costs.num_micro_batches - 1
        ready = [
            self.weights_end.get((unit, last), backward[-1])
            for unit, backward in enumerate(self.backward_end)
        ]
        for part, (_, end) in zip(costs.sums, self.sums, strict=True):
            for stage in part.stages:
                for unit in costs.units_of[stage]:
                    ready[unit] = max(ready[unit], end)
        # Stages that share a device update one after the other, when all their sums are done.
        at: dict[int, float] = {}
        for unit, device in enumerate(costs.device_of):
            at[device] = max(at.get(device, 0.0), ready[unit])
        self.ends = []
        for unit, device in enumerate(costs.device_of):
            at[device] += costs.optimizer[unit]
            self.ends.append(at[device])


def complete_at(
    costs: PipelineCosts, part: GradientSum, backward_end: Sequence[Sequence[float]]
) -> float:
    """When the gradients of an AllReduce are there on all units that take part."""
    units = [unit for stage in part.stages for unit in costs.units_of[stage]]
    leads = part.leads or (0.0,) * len(units)
    return max(backward_end[u][-1] - lead for u, lead in zip(units, leads, strict=True))


def deadlock(costs: PipelineCosts, unit: int, action: int) -> ScheduleError:
    """The error for a unit that can never run its next action."""
    stage = costs.stage_of[unit]
    name = f"{stage}F{action}" if action >= 0 else f"{stage}B{~action}"
    return ScheduleError(
        f"deadlock: stage {stage} waits at {name} for ever; warm-up must not increase along the "
        "pipeline"
    )
