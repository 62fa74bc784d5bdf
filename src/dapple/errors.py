"""Every error that dapple raises for a user's mistake or a failed run.

    DappleError
    |-- InputError              a file, field, flag or argument is wrong         (exit code 2)
    |   |-- FileError           missing, unreadable, or not in the stated format
    |   |-- UnitError           "25 Gbit/s" and the like could not be read
    |   |-- PlanError           no plan exists, or the plan does not fit model, cluster or world
    |   |   `-- MemoryPlanError no plan fits the devices' memory
    |   |-- ScheduleError       a schedule deadlocks, loses a micro-batch or exceeds its bound
    |   `-- CaptureError        the model cannot be captured or cut as asked
    |-- RunError                a run that had started failed                    (exit code 1)
        `-- RankFailure         one rank failed: rank, stage, micro-batch, action, cause

A message states the fact, the values and the remedy, in this order.
"""

from __future__ import annotations

import traceback

_MAX_CHARACTERS = 400


class DappleError(Exception):
    """Base of all errors that dapple raises on purpose."""

    exit_code = 1


class InputError(DappleError):
    """Something the user handed in is wrong."""

    exit_code = 2


class FileError(InputError):
    """A file is missing, unreadable, or not in the stated format."""


class UnitError(InputError):
    """A quantity such as "25 Gbit/s" could not be read."""


class PlanError(InputError):
    """No plan exists, or a plan does not fit the model, the cluster or the world size."""


class MemoryPlanError(PlanError):
    """Nothing in the search space fits the memory of the devices."""


class ScheduleError(InputError):
    """A schedule deadlocks, loses a micro-batch, or holds more of them than it may."""


class CaptureError(InputError):
    """A model cannot be captured, or cannot be cut where it was asked for."""


class RunError(DappleError):
    """A run that had started did not finish."""


class RankFailure(RunError):
    """One rank failed, and every other rank ended because of it.

    Args:
        rank: the rank that failed, not the one that reports it.
        stage: the stage it ran.
        micro_batch: the micro-batch in work, None outside of one.
        action: what it was doing, such as "forward" or "allreduce".
        cause: the original exception in words.
    """

    def __init__(
        self, rank: int, stage: int | None, micro_batch: int | None, action: str, cause: str
    ) -> None:
        self.rank = rank
        self.stage = stage
        self.micro_batch = micro_batch
        self.action = action
        self.cause = cause
        super().__init__(
            f"rank {rank} failed (stage {_or_dash(stage)}, micro-batch {_or_dash(micro_batch)}, "
            f"action {action}): {cause}"
        )


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def one_line(error: BaseException) -> str:
    """An exception in words, as one line and without the C++ frames that torch appends."""
    text = "".join(traceback.format_exception_only(error)).partition("\nException raised from ")[0]
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " ..."
