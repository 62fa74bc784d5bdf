"""Whether a training job can be done, found out before anything is measured or started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dapple.errors import DappleError, InputError

if TYPE_CHECKING:
    from dapple.job import Job


def check_job(job: Job) -> None:
    """Find out whether everything that a job names can be made, before minutes of profiling.

    Raises:
        InputError: one can not; names it.
    """
    from dapple.runtime.recipe import check_optimizer, metrics_of, workload_factory

    workload_factory(job)
    metrics_of(job)
    check_optimizer(job)
    _check_data(job, "train")
    if job.data.validation_batches:
        _check_data(job, "validation")


def _check_data(job: Job, split: str) -> None:
    from dapple.runtime.data import JobData

    where = f'data factory "{job.data.factory}", split "{split}"'
    try:
        batch = JobData(job, split).first()
    except DappleError:
        raise
    except Exception as error:
        raise InputError(f"{where}: {type(error).__name__}: {error}") from error
    if batch is None:
        raise InputError(f"{where}: it has no batches; return at least one per step")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InputError(
            f"{where}: a batch is {type(batch).__name__}; return pairs of (inputs, targets)"
        )
