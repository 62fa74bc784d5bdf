"""Schedules as text: PyTorch's CSV of computations, one row per rank, cells like "2F0".

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

Empty cells are pauses in a drawing and mean nothing here. `torch.distributed.pipelining` reads and
writes the same ("compute_only").
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

from dapple.errors import FileError, ScheduleError
from dapple.files import cannot_write, read_text
from dapple.schedule.actions import Action, Schedule

SUFFIX = ".csv"


def is_file(name: str) -> bool:
    """The name of a schedule is that of a file."""
    return name.endswith(SUFFIX)


def load_schedule(path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule; its number of micro-batches is the highest one named, plus one.

    `check_schedule` then tells whether it ends.

    Raises:
        FileError: the file can't be read.
        ScheduleError: a cell is no computation; names row and column, counted from 1.
    """
    rows = []
    try:
        for number, cells in enumerate(csv.reader(read_text(path).splitlines()), start=1):
            if any(cell.strip() for cell in cells):
                rows.append(_row(cells, f"{path}, row {number}"))
    except csv.Error as error:
        raise FileError(f"{path} is no CSV file: {error}") from error
    if not rows:
        raise ScheduleError(f'{path} has no actions; write one row per rank, such as "0F0,0B0"')
    total = 1 + max(action.micro_batch for row in rows for action in row)
    return Schedule(str(path), total, tuple(rows))


def save_schedule(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule.

    Raises:
        FileError: the file can't be written.
    """
    try:
        Path(path).write_text(f"{schedule}\n", encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from error


def _row(cells: list[str], where: str) -> tuple[Action, ...]:
    actions = []
    for column, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        try:
            actions.append(Action.parse(cell))
        except ScheduleError as error:
            raise ScheduleError(f"{where}, column {column}: {error}") from None
    return tuple(actions)
