"""Reading of text files and wording of validation faults, shared by all file formats."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from dapple.errors import FileError


def describe_validation(error: ValidationError) -> str:
    """One line for a validation error: the first three faults, each as field, value, reason."""
    found = error.errors(include_url=False)
    # A list whose entries are refused is then also reported as too short.
    refused = {fault["loc"][:1] for fault in found if len(fault["loc"]) > 1}
    real = [f for f in found if not (f["type"] == "too_short" and f["loc"] in refused)]
    faults = []
    for fault in real[:3]:
        field = ".".join(str(part) for part in fault["loc"]) or "the file"
        value = repr(fault["input"])
        shown = "" if len(value) > 60 else f" (got {value})"
        faults.append(f"{field}: {fault['msg'].removeprefix('Value error, ')}{shown}")
    more = len(real) - len(faults)
    return "; ".join(faults) + (f"; and {more} more" if more > 0 else "")


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a text file.

    Raises:
        FileError: the file is missing, unreadable, or not UTF-8 text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileError(f"{path} does not exist; check the path") from None
    except UnicodeDecodeError:
        raise FileError(f"{path} is not a text file; check the path") from None
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {error}; check the path") from None
