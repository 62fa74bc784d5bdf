"""Job files: what they mean, their defaults, and what is wrong with one.

What a wrong field is answered with is in tests/cli/test_refusals_torch.py.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple.errors import DappleError, FileError
from dapple.job import load_job

ROOT = Path(__file__).parents[1]
LEAST = """
name = "least"
folder = "runs/least"
[model]
factory = "mlp"
[data]
factory = "my_data:batches"
[training]
steps = 10
global_batch_size = 8
"""


def loaded(text: str, tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return load_job(path)


def test_a_job_needs_a_name_a_folder_a_model_data_and_a_length(tmp_path):
    """The rest has defaults: this machine with two devices, a plan of our own, AdamW."""
    job = loaded(LEAST, tmp_path)
    assert (job.cluster.name, job.cluster.devices, job.cluster.memory) == ("local", 2, None)
    assert (job.plan.file, job.plan.planner, job.plan.schedule) == (
        "auto",
        "dapple",
        "early-backward",
    )
    assert job.plan.profile_batch_sizes == (1, 2, 4, 8)
    assert (job.optimizer.name, job.optimizer.arguments) == ("adamw", {"lr": 3e-4})
    assert (job.training.seed, job.training.validate_every) == (0, 0)
    assert job.data.validation_batches == 2


def test_the_demos_job_is_valid():
    """Two devices that do not hold a whole replica."""
    job = load_job(ROOT / "examples" / "demo.toml")
    assert job.cluster.memory == 110 * 2**20
    assert job.plan.file == "auto"
    assert job.training.steps_without_memory_limit > 0


@pytest.mark.parametrize("line", LEAST.strip().splitlines())
def test_each_line_of_the_least_job_is_needed(line: str, tmp_path):
    """Without it the field is named."""
    if line.startswith("["):
        return
    with pytest.raises(FileError, match=line.split()[0]):
        loaded(LEAST.replace(line, "", 1), tmp_path)


def test_memory_is_a_quantity_in_words_or_bytes(tmp_path):
    """Both mean the same."""
    jobs = [loaded(LEAST + f"[cluster]\nmemory = {m}\n", tmp_path) for m in ('"1 KiB"', "1024")]
    assert {job.cluster.memory for job in jobs} == {1024}


@given(st.text(max_size=60))
def test_no_text_whatever_raises_anything_but_a_dapple_error(tmp_path_factory, text: str):
    """Also after a valid job."""
    for content in (text, LEAST + text):
        with contextlib.suppress(DappleError):
            loaded(content, tmp_path_factory.mktemp("job"))
