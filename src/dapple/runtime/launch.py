"""Starting a run on this machine through torchrun."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from dapple.errors import DappleError, InputError, RunError


def under_torchrun() -> bool:
    """This process was started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(processes: int, module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module arguments` in so many processes and wait for them.

    Raises:
        InputError: the processes ended with exit code 2: they have said what is wrong.
        RunError: a process failed.
        KeyboardInterrupt: the run was told to end.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # One thread per process: the profile was measured so, and more only get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The ranks say themselves what went wrong; the launcher's log would only repeat it at length.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    command = ["--standalone", f"--nproc-per-node={processes}", "-m", module, *arguments]
    try:
        run(parse_args(command))
    except ChildFailedError as error:
        raise _failure(error) from None
    except SignalException:
        # Ctrl-C or SIGTERM to the launcher, which has ended the processes by now.
        raise KeyboardInterrupt from None


def _failure(error: object) -> DappleError:
    failures = getattr(error, "failures", {})
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    text = ", ".join(f"rank {rank} with {code}" for rank, code in sorted(codes.items()))
    kind = InputError if 2 in codes.values() else RunError
    return kind(f"the run ended: {text or error}; the first failure is reported above")
