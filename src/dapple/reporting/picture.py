"""Steps as pictures, for pages and slides: SVG, PNG or PDF by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dapple.errors import InputError
from dapple.files import cannot_write
from dapple.records import Timeline

PICTURES = (".svg", ".png", ".pdf")
"""Kinds of files, by the end of their names."""
MOST_SPANS = 50_000
MOST_ROWS = 64
_RESOLUTION = 150
_CHANGING = {
    "svg": ("Date", "Creator"),
    "png": ("Software",),
    "pdf": ("CreationDate", "Creator", "Producer"),
}
_EXTRA = "pip install 'dapple-parallel[pictures]'"


def check_picture(path: str | os.PathLike[str]) -> None:
    """Find out before the work that a picture can't be made.

    Raises:
        InputError: matplotlib is not installed, or the name does not end in one of `PICTURES`.
    """
    if Path(path).suffix.lower() not in PICTURES:
        raise InputError(
            f"{path} has no known kind of picture; end its name in {', '.join(PICTURES)}"
        )
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"a picture needs matplotlib, which is not installed; {_EXTRA}")


def save_picture(path: str | os.PathLike[str], timelines: Mapping[str, Timeline]) -> None:
    """Draw steps one below the other on the same axis of time.

    Each has a row per rank with what it computes, above and below it the messages that it sends,
    and a curve of the micro-batches that each stage holds. Of more than 16 ranks only the first
    replica of each stage is drawn. The same timelines give the same file.

    Args:
        path: of the picture; its end says which kind, see `PICTURES`.
        timelines: simulated or measured ones, by title.

    Raises:
        InputError: matplotlib is missing, the kind is unknown, a timeline has no spans, or too
            many for a picture.
        FileError: the file can't be written.
    """
    check_picture(path)
    if not timelines:
        raise InputError("there is no timeline to draw; pass at least one")
    most = max(len(timeline.spans) for timeline in timelines.values())
    if most > MOST_SPANS:
        raise InputError(
            f"{most} spans are too many for a picture of at most {MOST_SPANS}; look at them as a "
            "trace (`--trace`), or draw fewer micro-batches"
        )
    from matplotlib import rc_context

    from dapple.reporting.gantt import STYLE, draw_steps

    with rc_context(STYLE):
        figure = draw_steps(timelines, MOST_ROWS)
        kind = Path(path).suffix.lower()[1:]
        # Without a date and a version the same picture is the same file.
        metadata = dict.fromkeys(_CHANGING[kind])
        try:
            figure.savefig(path, dpi=_RESOLUTION, metadata=metadata)
        except OSError as error:
            raise cannot_write(path, error) from error
