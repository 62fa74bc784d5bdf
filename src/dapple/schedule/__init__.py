"""Schedules as data: which stage computes which micro-batch in which order."""

from dapple.schedule.actions import Action, Schedule
from dapple.schedule.check import check_schedule
from dapple.schedule.messages import Link, Message, Progress, Room, Routes
from dapple.schedule.planned import planned_schedule, schedule_for
from dapple.schedule.policies import (
    SCHEDULES,
    early_backward,
    gpipe,
    interleaved,
    make_schedule,
    warmup_counts,
    zero_bubble,
)
from dapple.schedule.table import is_file, load_schedule, save_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Link",
    "Message",
    "Progress",
    "Room",
    "Routes",
    "Schedule",
    "check_schedule",
    "early_backward",
    "gpipe",
    "interleaved",
    "is_file",
    "load_schedule",
    "make_schedule",
    "planned_schedule",
    "save_schedule",
    "schedule_for",
    "warmup_counts",
    "zero_bubble",
]
