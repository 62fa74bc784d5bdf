"""Proof, before any process starts, that a schedule ends and stays within its bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapple.errors import ScheduleError
from dapple.schedule.actions import Action, Schedule
from dapple.schedule.messages import Link, Message, Progress, Room, Routes, chain


def check_schedule(
    schedule: Schedule,
    max_in_flight: Sequence[int] | None = None,
    links: Iterable[Link] | None = None,
) -> Room:
    """Check pairing, order, absence of deadlock, and the bound on micro-batches in flight.

    Deadlock is looked for by executing the schedule without time, with receives posted by rules
    4 and 5 and messages first in, first out.

    Returns:
        The room for messages that the schedule needs.

    Args:
        schedule: the schedule.
        max_in_flight: per stage the bound K_i; None: not checked.
        links: which stages exchange tensors; None: each stage with the next one.

    Raises:
        ScheduleError: names the stage and the action at fault.
    """
    _check_stages(schedule)
    for row in schedule.actions:
        for stage in sorted({action.stage for action in row}):
            actions = [action for action in row if action.stage == stage]
            _check_pairing(schedule, stage, actions)
            _check_order(stage, actions)
    room = _Execution(schedule, chain(schedule.num_stages) if links is None else links).run()
    if max_in_flight is not None:
        for stage, (peak, bound) in enumerate(
            zip(schedule.in_flight(), max_in_flight, strict=True)
        ):
            if peak > bound:
                raise ScheduleError(
                    f"stage {stage} holds {peak} micro-batches in flight, its bound is {bound}; "
                    "lower its warm-up"
                )
    return room


def _check_stages(schedule: Schedule) -> None:
    of_stage: dict[int, int] = {}
    for position, stages in enumerate(schedule.stages):
        if not stages:
            raise ScheduleError(f"row {position} is empty; give each row the actions of its stages")
        for stage in stages:
            if stage in of_stage:
                raise ScheduleError(
                    f"stage {stage} has actions in rows {of_stage[stage]} and {position}; a stage "
                    "runs on the devices of one row"
                )
            of_stage[stage] = position
    missing = set(range(len(of_stage))) - set(of_stage)
    if missing:
        raise ScheduleError(
            f"no row has actions of stage {min(missing)}, but one has those of stage "
            f"{max(of_stage)}; number stages from 0 without gaps"
        )


def _check_pairing(schedule: Schedule, stage: int, actions: Sequence[Action]) -> None:
    found = set(actions)
    if len(actions) != len(found):
        seen: set[Action] = set()
        twice = next(a for a in actions if a in seen or seen.add(a))  # type: ignore[func-returns-value]
        raise ScheduleError(f"stage {stage} computes {twice} twice")
    wanted = {Action(stage, "F", m) for m in range(schedule.num_micro_batches)}
    for m in range(schedule.num_micro_batches):
        halves = {Action(stage, "I", m), Action(stage, "W", m)}
        wanted |= halves if found & halves else {Action(stage, "B", m)}
    if found != wanted:
        odd = min(found ^ wanted, key=lambda a: (a.micro_batch, a.kind))
        verb = "misses" if odd in wanted else "has no use for"
        raise ScheduleError(
            f"stage {stage} {verb} {odd}; with {schedule.num_micro_batches} micro-batches each "
            "needs one forward and one backward (B, or I and W)"
        )


def _check_order(stage: int, actions: Sequence[Action]) -> None:
    # Messages between two stages are first in, first out, and buffers are freed in that order.
    for kinds in ("F", "BI", "BW"):
        chosen = [a for a in actions if a.kind in kinds]
        order = [a.micro_batch for a in chosen]
        if order != sorted(order):
            present = " and ".join(sorted({a.kind for a in chosen}))
            raise ScheduleError(
                f"stage {stage} runs its {present} actions in the order {order}; "
                "messages are first in, first out, so micro-batches must ascend"
            )


class _Execution:
    """A run of the schedule without time."""

    def __init__(self, schedule: Schedule, links: Iterable[Link]) -> None:
        self._schedule = schedule
        self._routes = Routes(schedule, links)
        positions = range(schedule.num_positions)
        self._at = [0 for _ in positions]
        self._progress = [Progress(schedule.num_stages) for _ in positions]
        self._room = Room.of(schedule.in_flight())
        self._sent: set[Message] = set()
        self._posted: set[Message] = set()
        # Per receiver and sender what is still to be posted, the next one last.
        sent = [self._routes.by_receiver(row) for row in schedule.actions]
        self._queues = [
            [sent[sender][receiver][::-1] for sender in positions] for receiver in positions
        ]

    def run(self) -> Room:
        """Run all actions; where all wait and one for room, give it room.

        Raises:
            ScheduleError: some can never run.
        """
        moved = True
        while moved:
            moved = False
            for position in range(self._schedule.num_positions):
                while self._advance(position):
                    moved = True
            moved = moved or self._widen()
        for position, actions in enumerate(self._schedule.actions):
            if self._at[position] < len(actions):
                action = actions[self._at[position]]
                missing = self._missing(position, action)
                raise ScheduleError(
                    f"deadlock: stage {action.stage} waits at {action} for {missing} for ever"
                )
        return self._room

    def _widen(self) -> bool:
        """Make room for the message that the first message waited for stands behind, or is."""
        for position, actions in enumerate(self._schedule.actions):
            if self._at[position] == len(actions):
                continue
            missing = self._missing(position, actions[self._at[position]])
            if isinstance(missing, Message) and missing in self._sent:
                receiver = self._schedule.position_of[missing.target]
                sender = self._schedule.position_of[missing.source]
                head = self._queues[receiver][sender][-1]
                self._room = self._room.widened(head)
                return True
        return False

    def _advance(self, position: int) -> bool:
        actions, at = self._schedule.actions[position], self._at[position]
        self._post(position)
        if at == len(actions) or self._missing(position, actions[at]) is not None:
            return False
        self._progress[position].count(actions[at])
        self._sent.update(self._routes.sends(actions[at]))
        self._at[position] += 1
        return True

    def _post(self, position: int) -> None:
        for queue in self._queues[position]:
            while queue and self._progress[position].allows(queue[-1], self._room):
                self._posted.add(queue.pop())

    def _missing(self, position: int, action: Action) -> Action | Message | None:
        """What an action still waits for; None if it can run."""
        stage, micro_batch, progress = action.stage, action.micro_batch, self._progress[position]
        if action.kind != "F" and progress.forwards[stage] <= micro_batch:
            return Action(stage, "F", micro_batch)
        if action.kind == "W" and progress.returned[stage] <= micro_batch:
            return Action(stage, "I", micro_batch)
        for message in self._routes.needs(action):
            if message not in self._sent:
                return message
            if not self._routes.is_local(message) and message not in self._posted:
                return message
        if action.returns:
            # The runtime lets go of what it sent, which has to be received by then.
            for message in self._routes.sends(action._replace(kind="F")):
                if not self._routes.is_local(message) and message not in self._posted:
                    return message
        return None
