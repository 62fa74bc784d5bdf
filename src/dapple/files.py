"""Reading and writing of files, and wording of what is wrong with them, for all formats."""

from __future__ import annotations

import errno
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


def cannot_write(path: str | os.PathLike[str], error: OSError) -> FileError:
    """What to raise for a file that can't be written."""
    return FileError(f"cannot write {path}: {error.strerror or error}; choose another path")


def check_output(path: Path, *, folder: bool = False) -> None:
    """Find out before the work, not after it, that a result can't be written.

    Args:
        path: of the result; the folder that it goes into is made.
        folder: the result is a folder itself.

    Raises:
        FileError: it can't be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        into = path.parent
        if folder and path.exists():
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is a file, and a folder is to be made")
            into = path
        elif path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        elif path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        if not os.access(into, os.W_OK):
            raise PermissionError(errno.EACCES, f"no permission to write into {into}")
    except OSError as error:
        raise cannot_write(path, error) from error
