"""Proof, before any process starts, that a schedule ends and stays within its bounds."""

from __future__ import annotations

from collections.abc import Sequence

from dapple.errors import ScheduleError
from dapple.schedule.actions import Action, Schedule


def check_schedule(schedule: Schedule, max_in_flight: Sequence[int] | None = None) -> None:
    """Check pairing, order, absence of deadlock, and the bound on micro-batches in flight.

    Deadlock is looked for by executing the schedule without time: an action runs once the
    action that feeds it has run (forward: the previous stage's forward; backward: the own
    forward and the next stage's backward).

    Args:
        schedule: the schedule.
        max_in_flight: per stage the bound K_i; None: not checked.

    Raises:
        ScheduleError: names the stage and the action at fault.
    """
    for stage, actions in enumerate(schedule.actions):
        _check_pairing(schedule, stage, actions)
        _check_order(stage, actions)
    _check_deadlock(schedule)
    if max_in_flight is not None:
        for stage, (peak, bound) in enumerate(
            zip(schedule.in_flight(), max_in_flight, strict=True)
        ):
            if peak > bound:
                raise ScheduleError(
                    f"stage {stage} holds {peak} micro-batches in flight, its bound is {bound}; "
                    "lower its warm-up"
                )


def _check_pairing(schedule: Schedule, stage: int, actions: Sequence[Action]) -> None:
    wanted = {Action(stage, k, m) for k in ("F", "B") for m in range(schedule.num_micro_batches)}
    found = set(actions)
    if len(actions) != len(found):
        twice = next(a for i, a in enumerate(actions) if a in actions[:i])
        raise ScheduleError(f"stage {stage} computes {twice} twice")
    if found != wanted:
        odd = min(found ^ wanted)
        verb = "misses" if odd in wanted else "has no use for"
        raise ScheduleError(
            f"stage {stage} {verb} {odd}; with {schedule.num_micro_batches} micro-batches each "
            "needs one forward and one backward"
        )


def _check_order(stage: int, actions: Sequence[Action]) -> None:
    # Messages between two stages are first in, first out: NCCL knows no tags.
    for kind in ("F", "B"):
        order = [a.micro_batch for a in actions if a.kind == kind]
        if order != sorted(order):
            raise ScheduleError(
                f"stage {stage} runs its {kind} actions in the order {order}; messages are first "
                "in, first out, so micro-batches must ascend"
            )


def _check_deadlock(schedule: Schedule) -> None:
    done: set[Action] = set()
    position = [0] * schedule.num_stages
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.actions):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                if not done.issuperset(_needs(action, schedule.num_stages)):
                    break
                done.add(action)
                position[stage] += 1
                moved = True
    for stage, actions in enumerate(schedule.actions):
        if position[stage] < len(actions):
            action = actions[position[stage]]
            missing = next(a for a in _needs(action, schedule.num_stages) if a not in done)
            raise ScheduleError(f"deadlock: stage {stage} waits at {action} for {missing} for ever")


def _needs(action: Action, num_stages: int) -> list[Action]:
    stage, kind, m = action
    if kind == "F":
        return [Action(stage - 1, "F", m)] if stage > 0 else []
    needs = [Action(stage, "F", m)]
    if stage + 1 < num_stages:
        needs.append(Action(stage + 1, "B", m))
    return needs
