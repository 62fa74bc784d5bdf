"""The examples run as they stand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dapple.cluster import load_cluster
from dapple.job import load_job
from dapple.records import Plan, StagePlan
from tests.docs.blocks import ROOT

EXAMPLES = ROOT / "examples"


def two_stages(job_file: Path, layers: int) -> Plan:
    """A plan for the job of an example, so that nothing has to be profiled."""
    rows = load_job(job_file).training.global_batch_size
    half = layers // 2
    return Plan(
        model="example",
        global_batch_size=rows,
        micro_batch_size=rows // 4,
        num_micro_batches=4,
        stages=(
            StagePlan(start=0, stop=half, devices=(0,), warmup=2),
            StagePlan(start=half, stop=layers, devices=(1,), warmup=1),
        ),
        cluster=load_cluster("config-a:1x2"),
    )


def test_a_training_of_ones_own_runs(tmp_path):
    """Own loss, weight, metric and data, groups, a scheduler, bf16 and clipping in one job."""
    job = EXAMPLES / "own_training.toml"
    two_stages(job, 7).save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "dapple", "train", job.name, "--plan", tmp_path / "plan.json"]
    options = ["--steps", "12", "--output", tmp_path / "run"]
    done = subprocess.run(
        [*command, *options], cwd=EXAMPLES, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation accuracy" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 12
    assert all(row["gradient_norm"] > 0 for row in steps)
    first, last = (row for row in rows if "validation_loss" in row)
    assert last["validation_loss"] < first["validation_loss"]
    assert 0 <= first["validation_accuracy"] < last["validation_accuracy"] <= 1
    assert "6.weight" in torch.load(tmp_path / "run" / "weights.pt")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_jobs_of_the_examples_are_valid(path: Path, monkeypatch):
    """What they name is there and fits together."""
    from dapple.cli.job_check import check_job

    monkeypatch.chdir(EXAMPLES)
    if "transformers" in path.name:
        pytest.importorskip("transformers")
    check_job(load_job(path))
