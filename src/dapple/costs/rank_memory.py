"""Bytes of a device that runs any row of a schedule: docs/semantics.md, "Memory of a device"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dapple.costs.memory import StageMemory, stage_memory
from dapple.costs.model import CostModel
from dapple.records import StagePlan
from dapple.schedule import Action, Room, Schedule


def rank_peak_bytes(
    model: CostModel,
    stages: Sequence[StagePlan],
    schedule: Schedule,
    room: Room,
    position: int,
    micro_batch_rows: int,
    *,
    optimizer_state_factor: float = 2.0,
    replica: int | None = None,
) -> int | None:
    """Bytes that a replica of a position holds at its peak.

    Args:
        model: costs of layers.
        stages: all stages of the plan.
        schedule: what the position computes.
        room: micro-batches that are received ahead, from `check_schedule`.
        position: which position.
        micro_batch_rows: rows of the largest micro-batch, before the replica split.
        optimizer_state_factor: optimizer state in units of the parameters' bytes.
        replica: which replica; None: the one with most rows.

    Returns:
        None when the profile has no saved bytes for a layer of the position.
    """
    own, row = schedule.stages[position], schedule.actions[position]

    def memory(stage: int, in_flight: int) -> StageMemory | None:
        return stage_memory(
            model,
            stages,
            stage,
            micro_batch_rows,
            in_flight,
            optimizer_state_factor=optimizer_state_factor,
            replica=replica,
        )

    if len(own) == 1 and all(action.kind in "FB" for action in row):
        plain = memory(own[0], room.inputs[own[0]])
        return None if plain is None else plain.total
    parts: dict[int, _Part] = {}
    for stage in own:
        one, two = memory(stage, 1), memory(stage, 2)
        if one is None or two is None:
            return None
        parts[stage] = _Part.of(one, two)
    resident = sum(part.resident for part in parts.values())
    resident -= _counted_twice(model, [stages[s] for s in own], optimizer_state_factor)
    messages = sum(
        (room.inputs[s] + 1) * (part.inputs + part.sent) + room.gradients[s] * part.gradients
        for s, part in parts.items()
    )
    passing = max(part.recomputed + part.workspace for part in parts.values())
    return resident + messages + _most_alive(row, parts) + passing


class _Part(NamedTuple):
    """Bytes of one stage: of its parameters, per micro-batch, and for a moment."""

    resident: int
    kept: int
    recomputed: int
    inputs: int
    gradients: int
    sent: int
    workspace: int

    @classmethod
    def of(cls, one: StageMemory, two: StageMemory) -> _Part:
        """From the memory with one micro-batch in flight, and with two."""
        kept = two.activations - one.activations
        return cls(
            resident=one.total - one.dynamic,
            kept=kept,
            recomputed=one.activations - kept,
            inputs=two.received_inputs - one.received_inputs,
            gradients=one.received_gradients // 2,
            sent=two.sent_gradients - one.sent_gradients,
            workspace=one.workspace,
        )


def _most_alive(row: Sequence[Action], parts: dict[int, _Part]) -> int:
    """The most bytes that the micro-batches in flight keep, over the actions of a row.

    Between the halves of a split backward the gradients inside the stage are kept as well; they
    count as much as the activations, and no more than these are left.
    """
    alive = most = 0
    for action in row:
        kept = parts[action.stage].kept
        if action.kind in "FI":
            alive += kept
            most = max(most, alive)
        else:
            alive -= kept if action.kind == "B" else 2 * kept
    return most


def _counted_twice(model: CostModel, stages: Sequence[StagePlan], state_factor: float) -> int:
    """Bytes of parameters that several stages of one device hold, with gradient and state."""
    twice = 0
    for group in model.profile.tied:
        layers = {member.layer for member in group.members}
        held = sum(any(stage.start <= n < stage.stop for n in layers) for stage in stages)
        twice += max(0, held - 1) * group.parameter_bytes
    return int(twice * (2 + state_factor))
