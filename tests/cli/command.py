"""The command line, called as a user calls it but in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import NamedTuple
from unittest import mock

from dapple.cli.main import run


class Result(NamedTuple):
    """What a command did."""

    code: object
    output: str
    error: str


def dapple(*arguments: object) -> Result:
    """Run `dapple ARGUMENTS`; an exception that would be a traceback comes out as it is."""
    output, error = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["dapple", *map(str, arguments)]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(error),
    ):
        try:
            run()
        except SystemExit as end:
            return Result(end.code, output.getvalue(), error.getvalue())


def succeeds(*arguments: object) -> str:
    """What a command prints; it must succeed."""
    result = dapple(*arguments)
    assert result.code == 0, result
    return result.output


def refuses(*arguments: object, code: int = 2) -> str:
    """The one line of a command that refuses its input."""
    result = dapple(*arguments)
    assert result.code == code, result
    assert result.output == ""
    line, end = result.error.split("\n", 1)
    assert end == ""
    assert line.startswith("dapple: error: ")
    return line
