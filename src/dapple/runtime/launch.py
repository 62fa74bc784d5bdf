"""Starting a run on this machine through torchrun."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence

import dapple.errors
from dapple.errors import DappleError, InputError, RunError

_ROLE = "dapple"  # what torchrun calls our ranks, and so how a rank knows who started it


def under_torchrun() -> bool:
    """This process was started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(processes: int, module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module arguments` in so many processes and wait for them.

    Raises:
        DappleError: what a process told by `tell_launcher`, as its own class.
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
    counts = ["--standalone", f"--nproc-per-node={processes}", f"--role={_ROLE}"]
    command = [*counts, "-m", module, *arguments]
    try:
        run(parse_args(command))
    except ChildFailedError as error:
        raise _failure(error) from None
    except SignalException:
        # Ctrl-C or SIGTERM to the launcher, which has ended the processes by now.
        raise KeyboardInterrupt from None


def tell_launcher(error: DappleError) -> bool:
    """Leave a rank's error to the launcher, which tells it once however many ranks have it.

    False: the rank was not started by `launch`, and has to tell it itself.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.environ.get("ROLE_NAME") != _ROLE:
        return False
    # torch's own format, with the name of the class beside the time.
    extra = {"timestamp": str(int(time.time())), "kind": type(error).__name__}
    text = json.dumps({"message": {"message": str(error), "extraInfo": extra}})
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return False
    return True


def _failure(error: object) -> DappleError:
    failures = dict(sorted(getattr(error, "failures", {}).items()))
    # The first that told, and not the first that ended: others are ended because of it.
    for failure in sorted(failures.values(), key=lambda failure: failure.timestamp):
        if isinstance(failure.message, dict) and "kind" in failure.message["extraInfo"]:
            kind = getattr(dapple.errors, failure.message["extraInfo"]["kind"])
            told: DappleError = kind(failure.message["message"])
            return told
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    text = ", ".join(f"rank {rank} with {code}" for rank, code in codes.items())
    kind = InputError if 2 in codes.values() else RunError
    return kind(f"the run ended: {text or error}; the first failure is reported above")
