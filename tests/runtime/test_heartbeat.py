from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator

import pytest

from dapple.errors import one_line
from dapple.runtime.causes import tells_of_a_lost_peer
from dapple.runtime.ending import TerminationPipe
from dapple.runtime.heartbeat import Beat, ProcessName, Progress, Pulses, Watch


def test_noting_an_action_costs_well_below_a_microsecond() -> None:
    progress = Progress(0, 0)
    seconds = min(timeit.repeat(lambda: progress.set("forward", 3), number=1000, repeat=20)) / 1000
    assert seconds < 1e-6


def test_the_same_action_again_is_seen_as_a_new_one() -> None:
    progress = Progress(0, 0)
    progress.set("forward", 3)
    before = progress.now
    progress.set("forward", 3)
    assert progress.now == before
    assert progress.now is not before


def test_an_action_reads_as_words() -> None:
    progress = Progress(0, 0)
    assert progress.describe() == "start"
    progress.set("backward", 2)
    assert progress.describe() == "backward of micro-batch 2"


def test_a_beat_survives_the_store() -> None:
    beat = Beat(3, 17, 1, "forward", 5, 0.25, ProcessName.own())
    assert Beat.decode(3, beat.encode()) == beat
    assert Beat.decode(4, "") == Beat(4)


def test_a_rank_is_silent_until_its_count_changes() -> None:
    pulses = Pulses()
    for count in (1, 2):
        pulses.see(Beat(0, count))
        pulses.see(Beat(1, 1))
        pulses.pass_time(3.0)
    silent = pulses.silent(5.0, also_unstarted=False)
    assert silent is not None
    assert (silent[0].rank, silent[1]) == (1, 6.0)


def test_a_rank_that_never_started_is_named_on_request_and_last() -> None:
    pulses = Pulses()
    pulses.see(Beat(0))
    pulses.pass_time(9.0)
    assert pulses.silent(5.0, also_unstarted=False) is None
    silent = pulses.silent(5.0, also_unstarted=True)
    assert silent is not None
    assert silent[0].rank == 0
    pulses.see(Beat(1, 1))
    pulses.pass_time(6.0)
    silent = pulses.silent(5.0, also_unstarted=True)
    assert silent is not None
    assert silent[0].rank == 1


def test_a_watcher_that_was_suspended_counts_one_lap() -> None:
    watch = Watch(1.0)
    assert [watch.lap(now) for now in (100.0, 100.5, 160.0, 160.25)] == [0.0, 0.5, 1.0, 0.25]


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], ProcessName]]:
    """Another process of this machine, and its name."""
    code = (
        "import dataclasses, json, time\n"
        "from dapple.runtime.heartbeat import ProcessName\n"
        "print(json.dumps(dataclasses.astuple(ProcessName.own())), flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    yield process, ProcessName(*json.loads(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()


linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")


@linux
def test_a_stopped_process_cannot_act_and_can_be_killed(
    sleeper: tuple[subprocess.Popen[bytes], ProcessName],
) -> None:
    process, name = sleeper
    assert name.is_on(ProcessName.own().machine)
    assert name.can_act()
    process.send_signal(signal.SIGSTOP)
    while name.can_act():
        time.sleep(0.01)
    assert not name.is_gone()
    name.kill()
    while not name.is_gone():  # a zombie is gone
        time.sleep(0.01)
    assert process.wait() == -signal.SIGKILL
    assert name.is_gone()


@linux
def test_a_process_with_the_same_pid_or_of_another_machine_is_left_alone(
    sleeper: tuple[subprocess.Popen[bytes], ProcessName],
) -> None:
    process, name = sleeper
    ProcessName(name.machine, name.pid, "1").kill()
    ProcessName("elsewhere", name.pid, name.started).kill()
    ProcessName("", name.pid, name.started).kill()
    ProcessName.own().kill()
    time.sleep(0.1)
    assert process.poll() is None


@pytest.mark.parametrize(
    ("error", "is_doubtful"),
    [
        (ValueError("boom"), False),
        (RuntimeError("CUDA out of memory"), False),
        (RuntimeError("[pair.cc:547] Connection closed by peer [::1]:2"), True),
        (RuntimeError("NCCL error: remote process exited"), True),
        (ConnectionResetError(), True),
    ],
)
def test_a_lost_connection_is_told_from_other_errors(error: Exception, is_doubtful: bool) -> None:
    assert tells_of_a_lost_peer(error) is is_doubtful


def test_an_error_that_comes_from_a_lost_connection_is_doubtful_too() -> None:
    error = ValueError("could not receive")
    error.__cause__ = RuntimeError("Broken pipe")
    assert tells_of_a_lost_peer(error)


def test_a_cause_is_one_short_line_without_frames_of_cpp() -> None:
    text = "first\n  second\nException raised from here at x.cpp:1\nframe #0"
    assert one_line(RuntimeError(text)) == "RuntimeError: first second"
    assert len(one_line(RuntimeError("x" * 5000))) < 500


def test_sigterm_reaches_a_waiting_thread_and_not_the_parent_of_a_fork() -> None:
    pipe = TerminationPipe()
    came: list[bool] = []
    waiter = threading.Thread(target=lambda: came.append(pipe.wait(10.0)))
    try:
        ready, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write_end, b"!")
            time.sleep(20)
            os._exit(0)
        os.read(ready, 1)
        os.close(ready)
        os.close(write_end)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM  # it ended, as by default
        assert not pipe.wait(0.1)
        waiter.start()
        os.kill(os.getpid(), signal.SIGTERM)
        waiter.join()
        assert came == [True]
    finally:
        pipe.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("first", [0, 1])
def test_two_pipes_of_one_process_close_in_any_order(first: int) -> None:
    """As two trainers in one script do; in the end SIGTERM is whose it was."""
    pipes = [TerminationPipe(), TerminationPipe()]
    pipes.pop(first).close()
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    assert pipes[0].wait(10.0)
    pipes[0].close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
