"""docs/training.md is true: its pieces, joined, are a script that runs."""

from __future__ import annotations

import subprocess
import sys

import torch

from dapple.cluster import load_cluster
from dapple.records import Plan, StagePlan
from tests.docs.blocks import blocks


def test_the_pieces_of_the_page_run(tmp_path):
    """In the order in which they stand, with a plan for one device."""
    plan = Plan(
        model="classifier",
        global_batch_size=24,
        micro_batch_size=8,
        num_micro_batches=3,
        stages=(StagePlan(start=0, stop=5, devices=(0,)),),
        cluster=load_cluster("config-a:1x1"),
    )
    plan.save(tmp_path / "plan.json")
    pieces = [block.text for block in blocks("docs/training.md") if block.mark == "python"]
    assert len(pieces) == 6
    (tmp_path / "page.py").write_text("\n".join(pieces))
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout
    assert "torch.Size([24, 4]) torch.bfloat16" in done.stdout
    assert "3.0.weight" in torch.load(tmp_path / "weights.pt")
