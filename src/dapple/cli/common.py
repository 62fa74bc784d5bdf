"""What several verbs share."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapple.errors import InputError
from dapple.files import cannot_write

if TYPE_CHECKING:
    from rich.console import Console

    from dapple.cluster import Cluster
    from dapple.records import ModelProfile

MOST_DEVICES = 4096
"""Devices of the largest cluster; a slip in a count must not keep a planner busy for days."""
MOST_ROWS = 1 << 20
"""Rows of the largest batch, as in `dapple.capture`."""


def console() -> Console:
    """Where results are printed."""
    from rich.console import Console

    found = Console(highlight=False)
    # In a pipe or a file there is no width to respect, and 80 columns would cut the tables.
    return found if found.is_terminal else Console(highlight=False, width=120)


def print_notes(profile: ModelProfile) -> None:
    """What capture found out about the model."""
    from rich.markup import escape

    for note in profile.notes:
        console().print(escape(f"note: {note}"))


def print_json(value: Any) -> None:
    """Print a result for another program."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def parse_arguments(text: str) -> dict[str, Any]:
    """Keyword arguments from a JSON object.

    Raises:
        InputError: not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f'--args {text!r} is not JSON: {error}; write it like {{"layers": 4}}'
        ) from error
    if not isinstance(value, dict):
        raise InputError(f'--args {text!r} is no JSON object; write it like {{"layers": 4}}')
    return value


def parse_batch_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Ascending whole numbers from "1,2,4".

    Raises:
        InputError: something else.
    """
    fault = InputError(f"{flag} {text!r} must be ascending whole numbers from 1, such as 1,2,4")
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise fault from None
    if sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise fault
    check_rows(sizes[-1], flag)
    return sizes


def read_profile(path: str, profile_batch_size: int | None) -> ModelProfile:
    """A profile file: our JSON, or the text format with its batch size.

    Raises:
        FileError: unreadable, or not in the format.
        InputError: a text profile without its batch size.
    """
    from dapple.files import read_text
    from dapple.records import ModelProfile, load_record
    from dapple.records.text_profile import load_text_profile

    text = read_text(path).lstrip()
    if profile_batch_size is not None:
        if text.startswith("{"):
            raise InputError(
                f"{path} is a JSON profile, which says its batch sizes itself; leave out "
                "--profile-batch-size"
            )
        return load_text_profile(path, profile_batch_size)
    if text.startswith("node"):
        raise InputError(
            f"{path} is a text profile, which does not say its batch size; pass "
            "--profile-batch-size"
        )
    return load_record(ModelProfile, path)


def find_cluster(name: str) -> Cluster:
    """A cluster file, a preset, or "local" (this machine, measured on first use).

    Raises:
        InputError: no such cluster, or one that is too large.
    """
    from dapple.cluster import load_cluster

    base, colon, count = name.partition(":")
    if base == "local":
        return local_cluster(_devices(name, count) if colon else os.cpu_count() or 1)
    if colon and not count:
        raise InputError(f'"{name}": write counts as MACHINESxDEVICES, such as {base}:4x8')
    cluster = load_cluster(name)
    if cluster.num_devices > MOST_DEVICES:
        raise InputError(
            f'cluster "{name}" has {cluster.num_devices} devices; at most {MOST_DEVICES} are '
            "planned for"
        )
    return cluster


def local_cluster(devices: int) -> Cluster:
    """This machine with so many devices, from its file; measured and written on first use."""
    from dapple.cluster import load_cluster

    path = local_cluster_path(devices)
    if not path.exists():
        from dapple.profiler.local import measure_local_cluster

        sys.stderr.write(f"measuring the links between {devices} processes of this machine\n")
        save_cluster(measure_local_cluster(devices), path)
    return load_cluster(str(path))


def local_cluster_path(devices: int) -> Path:
    """Where this machine's cluster file is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dapple" / f"local-{devices}.toml"


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster file.

    Raises:
        FileError: it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(cluster.to_toml(), encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from error


def _devices(name: str, count: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", count):
        raise InputError(f'cluster "{name}": write local devices as a number, such as local:2')
    return int(count)


def check_rows(rows: int, what: str) -> None:
    """Refuse batches that no run has.

    Raises:
        InputError: more than `MOST_ROWS`.
    """
    if rows > MOST_ROWS:
        raise InputError(f"{what} {rows} is too large; use at most {MOST_ROWS}")


def require_torch(verb: str) -> None:
    """Say what to install when torch is missing.

    Raises:
        InputError: torch is not installed.
    """
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"`dapple {verb}` needs torch, which is not installed; pip install "
            "'dapple-parallel[train]'"
        )


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON.

    Raises:
        FileError: it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value) + "\n", encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from error


@contextmanager
def progress(what: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on standard error, told (what, fraction done)."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=1.0)

        def report(detail: str, fraction: float) -> None:
            bar.update(task, completed=fraction, description=f"{what}: {detail}")

        yield report


@contextmanager
def step_progress(
    steps: int, what: str = "training"
) -> Iterator[Callable[[dict[str, float]], None]]:
    """A progress bar over steps on rank 0, told every line of metrics.jsonl.

    Without a terminal, validations are printed as lines.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    if os.environ.get("RANK", "0") != "0":
        yield lambda row: None
        return
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=steps)

        def report(row: dict[str, float]) -> None:
            if "validation_loss" in row:
                console.print(
                    f"step {row['step']:>5}: validation loss {row['validation_loss']:.3f}"
                )
            else:
                bar.update(task, completed=row["step"], description=_shown(row, what))

        yield report


def _shown(row: dict[str, float], what: str) -> str:
    return f"loss {row['loss']:.3f}" if "loss" in row else what
