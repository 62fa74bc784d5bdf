"""The data of a job: batches that its factory makes, or a dataset that each rank reads a part of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dapple.errors import InputError
from dapple.job import Job
from dapple.profiler.local import load_function
from dapple.runtime.sampling import OwnRows, PlanSampler


class JobData:
    """A split of the job's data: batches, the same on every rank, or a dataset of single examples.

    Of a dataset (`torch.utils.data.Dataset` with a length; an example is a pair of inputs and
    targets) each rank reads only the rows that it needs, see `PlanSampler`.

    Args:
        job: the job.
        split: "train" or "validation".

    Raises:
        InputError: the data factory is missing or refuses its arguments.
    """

    def __init__(self, job: Job, split: str) -> None:
        self._rows = job.training.global_batch_size
        self._seed = job.training.seed
        self._shuffle = split == "train"
        function = load_function(job.data.factory)
        try:
            found = function(
                split,
                global_batch_size=self._rows,
                seed=self._seed,
                **job.data.arguments,
            )
            is_dataset = isinstance(found, Dataset) and not isinstance(found, IterableDataset)
            self._dataset: Any = found if is_dataset else None
            self._batches = None if is_dataset else iter(found)
        except TypeError as error:
            raise InputError(
                f'data factory "{job.data.factory}" can not be used: {error}; it is called as '
                "factory(split, global_batch_size=..., seed=..., **arguments) and returns batches"
            ) from error

    def first(self) -> Any:
        """The first batch, or a dataset's first example as one; None: there is nothing."""
        if self._batches is not None:
            return next(self._batches, None)
        return default_collate([self._dataset[0]]) if len(self._dataset) else None

    def steps(self, reader: OwnRows) -> Iterator[Step]:
        """What every step gets on a rank: all rows, or of a dataset, without end, its own."""
        if self._batches is not None:
            for inputs, targets in self._batches:
                yield Step(inputs, targets, None)
            return
        sampler = PlanSampler(
            reader, len(self._dataset), self._rows, shuffle=self._shuffle, seed=self._seed
        )
        while True:
            for inputs, targets in DataLoader(self._dataset, batch_sampler=sampler):
                yield Step(inputs, targets, self._rows)


class Step(NamedTuple):
    """A step's batch; `global_batch_size` is None where it holds all rows."""

    inputs: Any
    targets: Any
    global_batch_size: int | None
