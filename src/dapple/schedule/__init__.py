"""Schedules as data: which stage computes which micro-batch in which order."""

from dapple.schedule.actions import Action, Schedule
from dapple.schedule.check import check_schedule
from dapple.schedule.policies import SCHEDULES, early_backward, gpipe, make_schedule, warmup_counts

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "check_schedule",
    "early_backward",
    "gpipe",
    "make_schedule",
    "warmup_counts",
]
