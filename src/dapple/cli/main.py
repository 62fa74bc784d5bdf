"""The command line: one file per verb, each imported only when its verb runs."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NoReturn

import typer

from dapple.cli import compare, emulate, plan, profile, simulate, train
from dapple.errors import DappleError, RankFailure

_INTERRUPTED = 130
_RANK_ZERO_SECONDS = 3.0

app = typer.Typer(
    name="dapple",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Plan and run pipeline and data parallel training of an unmodified PyTorch model.",
)
app.command()(profile.profile)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(compare.compare)
app.command()(train.train)
app.command()(emulate.emulate)


# The base of typer's errors about usage. Newer versions bring their own copy of click, so it is
# reached from the one that typer exports.
_UsageErrors: type[Exception] = typer.BadParameter.__mro__[2]


def run() -> NoReturn:
    """Run the command line; an error becomes one line and its exit code."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="dapple", standalone_mode=False)
    except RankFailure as error:
        code = error.exit_code  # the rank's monitor has told it
    except DappleError as error:
        code = error.exit_code
        if not _left_to_launcher(error):
            fail(str(error), code)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except _UsageErrors as error:
        fail(_usage(error), 2)
    if code == _INTERRUPTED:
        sys.stderr.write("dapple: interrupted\n")
    sys.exit(code or 0)


def fail(message: str, exit_code: int) -> NoReturn:
    """Print an error as one line and end."""
    text = " ".join(message.split())
    if os.environ.get("RANK", "0") != "0":
        # A rank's mistake is mostly every rank's. Rank 0 says it, and the launcher ends the rest.
        time.sleep(_RANK_ZERO_SECONDS)
    sys.stdout.flush()
    sys.stderr.write(f"dapple: error: {text}\n")
    sys.stderr.flush()
    sys.exit(exit_code)


def _left_to_launcher(error: DappleError) -> bool:
    """This is a rank of `dapple train`, whose launcher tells the error."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    from dapple.runtime.launch import tell_launcher  # a rank has loaded torch anyway

    return tell_launcher(error)


def _usage(error: Any) -> str:
    message: str = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{message}; see `{context.command_path if context else 'dapple'} --help`"
