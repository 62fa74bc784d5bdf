"""One rank of three goes wrong in real processes: all end within 10 s, and each names the culprit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime.failing_run import FAULTY_MICRO_BATCH

_SCRIPT = Path(__file__).with_name("failing_run.py")
_PROMISED_SECONDS = 10.0
_REPORT = re.compile(
    r"^dapple: rank (?P<failed>\d) failed \(stage (?P<stage>\d), micro-batch (?P<micro_batch>\S+), "
    r"action (?P<action>\w+)\): (?P<cause>.*); this is rank (?P<author>\d) \(stage \d\), "
    r"last action: \w+( of micro-batch \d+)?$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Case:
    """What goes wrong where, under which launcher, and what the others say of it."""

    launcher: str
    fault: str
    rank: int
    cause: str
    is_exact: bool = False  # the failed rank itself said where it was
    reporters: tuple[int, ...] = (0, 1, 2)

    def __str__(self) -> str:
        return f"{self.launcher}: {self.fault} on {self.rank}"


_RAISED = "ValueError: boom in two lines"
_KILLED = "the process was killed, or ended without close"
_SILENT = "no heartbeat for .* s: the process or its machine was stopped, is unreachable"
_HOST_LOST = r"the store that it hosts at 127.0.0.1:\d+ "

CASES = [
    Case("torchrun", "raise and sleep", 1, _RAISED, is_exact=True),
    Case("torchrun", "kill", 1, _KILLED, reporters=(0, 2)),
    Case("torchrun", "kill", 0, _KILLED, reporters=(1, 2)),
    Case("torchrun", "stop", 2, _SILENT, reporters=(0, 1)),
    Case("fork", "terminate", 1, "SIGTERM: this process was told to end", is_exact=True),
    Case("fork", "raise and sleep", 1, _RAISED, is_exact=True),
    Case("fork", "raise", 0, _RAISED, is_exact=True),
    Case("fork", "exit", 2, "SystemExit: 3", is_exact=True),
    Case("fork", "kill", 1, _KILLED, reporters=(0, 2)),
    Case("fork", "kill", 0, _HOST_LOST + "failed", reporters=(1, 2)),
    Case("fork", "stop", 0, _HOST_LOST + "(has not answered for 5 s|failed)", reporters=(1, 2)),
    Case(
        "fork",
        "stall",
        1,
        "stalled: no rank has begun a new action for [34] s, and this one",
        is_exact=True,
    ),
]


UNGUARDED = Case("torchrun", "raise after", 1, _RAISED)
DESERTED = Case("torchrun", "close early", 1, "it has closed the run, but rank [02] began another")
LAUNCHER_KILLED = Case("torchrun", "kill launcher", 1, "")
CLEAN = [
    Case("torchrun", "nothing", 0, ""),
    Case("fork", "nothing", 0, ""),
    Case("fork", "close 7 s after", 0, ""),
    Case("fork", "close 7 s after", 2, ""),
]


@dataclass
class Outcome:
    """How a run ended."""

    exit_code: int
    output: str
    seconds: float  # from the fault until the last process was gone


Outcomes = Callable[[Case], Outcome]


@pytest.fixture(scope="module")
def outcome_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcomes]:
    """The outcomes of the selected cases, whose runs mostly import and wait: two at a time."""
    folder = tmp_path_factory.mktemp("runs")
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    cases = [item.callspec.params.get("case") for item in functions if "case" in item.fixturenames]
    with ThreadPoolExecutor(2) as pool:
        futures: dict[Case, Future[Outcome]] = {
            case: pool.submit(_run, case, folder / str(case).replace(" ", "-"))
            for case in cases
            if isinstance(case, Case)
        }
        yield lambda case: futures[case].result()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_end_in_time_and_name_the_culprit(case: Case, outcome_of: Outcomes) -> None:
    outcome = outcome_of(case)
    reports = _check_reports(case, outcome)
    for report in reports:
        _check_place(report, case.is_exact)
    tracebacks = outcome.output.count("in _go_wrong\n")
    # The rank that knows where it was shows it, once; it needs no showing for sys.exit().
    assert tracebacks == (case.is_exact and case.fault != "exit"), outcome.output
    if case.launcher == "fork":
        codes = re.search(r"^exit codes (.*)$", outcome.output, re.MULTILINE)
        assert codes is not None
        assert "0" not in codes[1].split(), outcome.output


@pytest.mark.parametrize("case", [UNGUARDED], ids=str)
def test_an_uncaught_exception_outside_of_the_guard_is_named_too(
    case: Case, outcome_of: Outcomes
) -> None:
    for report in _check_reports(case, outcome_of(case)):
        assert (report["micro_batch"], report["action"]) == ("-", "checkpoint")


@pytest.mark.parametrize("case", [DESERTED], ids=str)
def test_a_rank_that_leaves_before_the_others_ends_them_and_itself(
    case: Case, outcome_of: Outcomes
) -> None:
    """As one whose loader has fewer batches; the others would wait for it for ever."""
    for report in _check_reports(case, outcome_of(case)):
        assert (report["micro_batch"], report["action"]) == ("-", "close")


@pytest.mark.parametrize("case", [LAUNCHER_KILLED], ids=str)
def test_ranks_do_not_outlive_their_launcher(case: Case, outcome_of: Outcomes) -> None:
    outcome = outcome_of(case)
    assert outcome.seconds < _PROMISED_SECONDS
    assert len(re.findall(r"^dapple: the run ends: the store at ", outcome.output, re.M)) == 3


@pytest.mark.parametrize("case", CLEAN, ids=str)
def test_a_clean_end_raises_no_alarm(case: Case, outcome_of: Outcomes) -> None:
    outcome = outcome_of(case)
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.count("clean end") == 3
    assert "dapple:" not in outcome.output


def _check_reports(case: Case, outcome: Outcome) -> list[re.Match[str]]:
    """Everything that holds for every failure; returns the lines that the ranks printed."""
    print(f"{case}: all gone {outcome.seconds:.1f} s after the fault")
    assert outcome.exit_code != 0, outcome.output
    assert outcome.seconds < _PROMISED_SECONDS, outcome.output
    reports = list(_REPORT.finditer(outcome.output))
    authors = sorted(int(report["author"]) for report in reports)
    assert authors == list(case.reporters), outcome.output
    assert outcome.output.count("dapple: rank") == len(reports), outcome.output
    for report in reports:
        assert int(report["failed"]) == int(report["stage"]) == case.rank, outcome.output
        assert re.match(case.cause, report["cause"]), outcome.output
    return reports


def _check_place(report: re.Match[str], is_exact: bool) -> None:
    micro_batch, action = int(report["micro_batch"]), report["action"]
    if is_exact:
        assert (micro_batch, action) == (FAULTY_MICRO_BATCH, "forward")
    else:  # as of the last heartbeat, 0.1 s earlier or, with all cores busy, some more
        assert FAULTY_MICRO_BATCH - 15 <= micro_batch <= FAULTY_MICRO_BATCH
        assert action in ("forward", "send", "receive")


def _run(case: Case, folder: Path) -> Outcome:
    """Run the script as the case says, until every one of its processes is gone."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [sys.executable, *(torchrun if case.launcher == "torchrun" else []), str(_SCRIPT)]
    command += [case.fault, str(case.rank), *(["--fork", "3"] if case.launcher == "fork" else [])]
    folder.mkdir()
    path = folder / "output"
    with path.open("wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        launcher.wait(90)
        while any(
            _is_running(int(pid)) for pid in re.findall(r"^pid (\d+)$", path.read_text(), re.M)
        ):
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    text = path.read_text()
    wrong_at = re.search(r"^wrong at (\S+)$", text, re.M)
    seconds = time.time() - float(wrong_at[1]) if wrong_at else 0.0
    return Outcome(launcher.returncode, text, seconds)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
