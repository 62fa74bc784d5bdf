"""The command line: one file per verb, each imported only when its verb runs."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from dapple.cli import plan, profile, simulate, train
from dapple.errors import DappleError

app = typer.Typer(
    name="dapple",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Plan and run pipeline and data parallel training of an unmodified PyTorch model.",
)
app.command()(profile.profile)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(train.train)


def run() -> NoReturn:
    """Run the command line; a `DappleError` becomes one line and its exit code."""
    try:
        app(standalone_mode=True)
    except DappleError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.stderr.write("dapple: interrupted\n")
        sys.exit(130)
    sys.exit(0)


def fail(error: DappleError) -> NoReturn:
    """Print an error as one line and end with its exit code."""
    text = " ".join(str(error).split())
    sys.stdout.flush()
    sys.stderr.write(f"dapple: error: {text}\n")
    sys.stderr.flush()
    sys.exit(error.exit_code)
