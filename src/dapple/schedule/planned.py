"""The schedule of a plan: by name or from a file, for its stages and devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapple.errors import ScheduleError
from dapple.schedule.actions import Schedule
from dapple.schedule.check import check_schedule
from dapple.schedule.messages import Link, Room
from dapple.schedule.policies import make_schedule
from dapple.schedule.table import is_file, load_schedule


def planned_schedule(
    name: str,
    num_micro_batches: int,
    warmup: Sequence[int],
    positions: Sequence[Sequence[int]],
    links: Iterable[Link] | None = None,
) -> tuple[Schedule, Room]:
    """The schedule that a plan's step follows, proved to end, and the room for messages it needs.

    Args:
        name, num_micro_batches, positions: as for `schedule_for`.
        warmup: K_i per stage of the plan; a step of fewer micro-batches has no more in flight.
        links: which stages exchange tensors; None: each stage with the next one.

    Raises:
        FileError, ScheduleError: as `schedule_for` and `check_schedule`.
    """
    counts = [min(count, num_micro_batches) for count in warmup]
    schedule = schedule_for(name, num_micro_batches, counts, positions)
    return schedule, check_schedule(schedule, counts if name == "early-backward" else None, links)


def schedule_for(
    name: str,
    num_micro_batches: int,
    warmup: Sequence[int],
    positions: Sequence[Sequence[int]],
) -> Schedule:
    """The schedule that a plan's step follows.

    Args:
        name: one of `SCHEDULES`, or the path of a CSV file.
        num_micro_batches: M.
        warmup: K_i per stage of the plan.
        positions: the stages that share devices, see `Plan.positions`.

    Raises:
        FileError: the file can't be read.
        ScheduleError: the schedule is unknown, or is not for this plan: names the row.
    """
    if is_file(name):
        schedule = load_schedule(name)
    else:
        schedule = make_schedule(name, num_micro_batches, warmup, len(positions[0]))
    if schedule.num_positions != len(positions):
        raise ScheduleError(
            f"{name} has {schedule.num_positions} rows, but the plan has {len(positions)} positions "
            "(devices that run the same stages); write one row for each"
        )
    for row, (found, wanted) in enumerate(zip(schedule.stages, positions, strict=True), start=1):
        if found != tuple(wanted):
            raise ScheduleError(
                f"{name}, row {row}: it runs the stages {list(found)}, but by the plan its devices "
                f"hold {list(wanted)}; plan with so many virtual stages, or change the row"
            )
    if schedule.num_micro_batches != num_micro_batches:
        raise ScheduleError(
            f"{name} is for {schedule.num_micro_batches} micro-batches, but the step has "
            f"{num_micro_batches}; change the batch size or num_micro_batches"
        )
    return schedule
