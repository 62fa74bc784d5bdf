"""A run over several machines: torchrun's agents find each other and their ranks train together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.records import Plan, StagePlan

TIME_LIMIT = 150
JOB = """
name = "nodes"
folder = "{folder}"

[model]
factory = "mlp"
arguments = {{ inputs = 8, outputs = 8, width = 8, hidden = 2 }}

[data]
factory = "tests.distributed.test_nodes:batches"
validation_batches = 0

[cluster]
devices = 2

[training]
steps = 3
global_batch_size = 6
"""


def batches(split: str, global_batch_size: int, seed: int):
    """The same three batches on every rank."""
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        yield (
            torch.randn(global_batch_size, 8, generator=generator),
            torch.randn(global_batch_size, 8, generator=generator),
        )


def test_two_agents_of_one_process_each_train_one_plan(tmp_path: Path) -> None:
    """`torchrun --nnodes 2`, once per machine with the same line; here both on this one."""
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(folder=tmp_path / "run"))
    kind = DeviceKind(name="cpu", memory=2**30)
    machine = Machines(
        count=2, devices=1, kind=kind, inside=Link(bandwidth=1e9), outside=Link(bandwidth=1e9)
    )
    plan = Plan(
        model="mlp",
        global_batch_size=6,
        micro_batch_size=3,
        num_micro_batches=2,
        cluster=Cluster(name="two machines", machines=(machine,)),
        stages=(
            StagePlan(start=0, stop=1, devices=(0,), warmup=2),
            StagePlan(start=1, stop=3, devices=(1,), warmup=1),
        ),
    )
    plan.save(tmp_path / "plan.json")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}", "--rdzv-id=dapple"),
        *("--local-addr=127.0.0.1", "-m", "dapple", "train", str(job)),
        f"--plan={tmp_path / 'plan.json'}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path()}
    agents = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        texts = [agent.communicate(timeout=TIME_LIMIT)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(texts)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    weights = torch.load(tmp_path / "run/weights.pt", weights_only=True)
    assert len(weights) == 6


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _path() -> str:
    root = Path(__file__).parents[2]
    return os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
