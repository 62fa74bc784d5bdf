"""How the command line starts: fast, and without torch where torch is not needed."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

VERBS = ("profile", "plan", "simulate", "train")
HELP_SECONDS = 0.5


def child_seconds() -> float:
    """Processor time of all children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("verb", [(), *[(verb,) for verb in VERBS]])
def test_help_answers_within_half_a_second(verb: tuple[str, ...]):
    """In processor time, the time of a machine that does nothing else. An example is shown."""
    command = [sys.executable, "-m", "dapple", *verb, "--help"]
    seconds = []
    for _ in range(3):
        before = child_seconds()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds.append(child_seconds() - before)
    assert min(seconds) < HELP_SECONDS
    assert all(name in done.stdout for name in (("Example: dapple", *verb) if verb else VERBS))


def test_without_arguments_the_help_is_shown():
    """As after --help."""
    commands = [[sys.executable, "-m", "dapple", *end] for end in ((), ("--help",))]
    alone, asked = (subprocess.run(c, capture_output=True, check=True).stdout for c in commands)
    assert alone == asked


def test_plan_and_simulate_never_import_torch(profile_file, tmp_path):
    """On a saved profile, printing tables and drawings included."""
    plan = tmp_path / "plan.json"
    code = f"""
import sys
from tests.cli.command import succeeds
options = ("--cluster", "config-a:1x2", "--global-batch-size", "8")
succeeds("plan", "--profile", "{profile_file}", *options, "-o", "{plan}")
succeeds("simulate", "{plan}", "--profile", "{profile_file}", "--trace", "{plan}.trace")
print(sorted(name for name in sys.modules if name.split(".")[0] == "torch"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_model_of_the_paper_is_planned_without_torch(tmp_path):
    """From the profile that comes with dapple; a saved one of it does as well."""
    plan = tmp_path / "plan.json"
    code = f"""
import sys
from tests.cli.command import succeeds
options = ("--device", "v100-16gb", "--cluster", "config-b:2x1", "--global-batch-size", "64")
shown = succeeds("plan", "--model", "vgg-19", *options, "-o", "{plan}")
assert "features.0" in shown or "stage" in shown, shown
print(sorted(name for name in sys.modules if name.split(".")[0] == "torch"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert '"model": "vgg-19"' in plan.read_text().replace('":"', '": "')
