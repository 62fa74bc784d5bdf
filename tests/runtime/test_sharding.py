"""A sharded optimizer: the same training with each parameter's state on one replica."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dapple.costs import CostModel, stage_memory
from dapple.graph import capture
from dapple.profiler.measured import measure_profile
from dapple.runtime.trainer import Trainer
from dapple.workload import Workload
from tests.runtime import cases
from tests.runtime.cases import Run
from tests.runtime.runs import SHARDED_RUNS
from tests.runtime.threads import OwnCopy, on_ranks, run_threads


@pytest.mark.parametrize("run", [*SHARDED_RUNS, Run("inside", (4,), shard="optimizer")], ids=str)
def test_it_trains_like_one_process(run: Run) -> None:
    """Parameters and losses of all replicas after three steps, in float64."""
    graph = cases.build(run.model)
    results = run_threads(
        sum(run.replicas), lambda t: cases.train(OwnCopy(graph), run, transport=t)
    )
    assert cases.error(run, results) < cases.TOLERANCE


@pytest.mark.parametrize("replicas", [(3,), (2, 3)], ids=str)
def test_each_state_is_kept_once(replicas: tuple[int, ...]) -> None:
    """Every parameter of a stage has state on one replica; one tied over stages on all of them."""
    graph, example = cases.build("gpt"), cases.EXAMPLES["gpt"]
    plan = cases.make_plan(graph, replicas, 12, 2, shard="optimizer")

    def work(trainer: Trainer) -> tuple[int, set[str], set[str]]:
        trainer.step(*example.batch(12, 0))
        names = {id(p): n for n, p in trainer.parts.trainable().items()}
        assert trainer.optimizer is not None
        return trainer.topology.stage, set(names.values()), {names[id(p)] for p in trainer.optimizer.state}  # fmt: skip

    found = on_ranks(graph, plan, work, cases.OPTIMIZERS["adamw"], weight=example.weight)
    tied = {group[0][1] for group in graph.tied}
    for stage, count in enumerate(replicas):
        parts = [(held, kept) for s, held, kept in found if s == stage]
        for name in parts[0][0]:
            keepers = sum(name in kept for _, kept in parts)
            assert keepers == (count if name in tied and len(replicas) > 1 else 1), name


def test_more_replicas_than_parameters() -> None:
    """A replica without a share has no optimizer, and the same parameters all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh())
    graph = capture(model.double(), torch.randn(3, 6).double(), loss=cases.squared_error)
    plan = cases.make_plan(graph, (3,), 12, 2, shard="optimizer")
    batch = cases.EXAMPLES["mlp"].batch(12, 0)

    def work(trainer: Trainer) -> tuple[bool, Tensor]:
        trainer.step(*batch)
        return trainer.optimizer is not None, trainer.state_dict()["0.weight"]

    found = on_ranks(graph, plan, work)
    assert [has for has, _ in found] == [True, False, False]
    assert all(torch.equal(weight, found[0][1]) for _, weight in found)
    assert not torch.equal(found[0][1], model[0].weight)


@pytest.mark.parametrize("split_messages", [False, True])
def test_groups_clipping_and_schedulers_work_on_shards(
    split_messages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise what every replica computes for itself, in one message or in many."""
    if split_messages:
        monkeypatch.setattr("dapple.runtime.sharding.MESSAGE_BYTES", 1)
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters.groups({"*.bias": {"lr": 0.02}}), lr=0.05)

    def weights(shard: Any) -> list[dict[str, Tensor]]:
        def work(trainer: Trainer) -> dict[str, Tensor]:
            for step in range(3):
                trainer.step(*example.batch(12, step))
            return trainer.state_dict()

        return on_ranks(
            graph,
            cases.make_plan(graph, (3, 2), 12, 2, shard=shard),
            work,
            optimizer,
            clip_norm=0.1,
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        )

    for whole, shared in zip(weights("none"), weights("optimizer"), strict=True):
        assert all(torch.equal(value, shared[name]) for name, value in whole.items())


def test_measured_memory_is_what_the_plan_says() -> None:
    """Peaks of three replicas with AdamW, each by its own share, and less than without."""
    torch.manual_seed(0)
    sizes = (32, 96, 128, 64, 160)
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]  # fmt: skip
    workload = Workload(
        "uneven",
        nn.Sequential(*blocks),
        lambda rows: (torch.randn(rows, 32),),
        lambda rows: torch.randn(rows, 160),
        nn.functional.mse_loss,
    )
    graph = capture(workload.model, workload.inputs(4), loss=workload.loss, name="uneven")
    profile = measure_profile(graph, workload, batch_sizes=(160,), rounds=1)
    batch = (workload.inputs(960)[0], workload.targets(960))
    found = {}
    for shard in ("none", "optimizer"):
        plan = cases.make_plan(graph, (3,), 960, 2, shard=shard)  # type: ignore[arg-type]

        def work(trainer: Trainer) -> tuple[int, int]:
            trainer.step(*batch)
            with trainer.measure_memory() as meter:
                trainer.step(*batch)
            return meter.peak_bytes, trainer.resident_bytes()

        peaks, resident = zip(*on_ranks(graph, plan, work, cases.OPTIMIZERS["adamw"]), strict=True)
        model = CostModel(profile, plan.cluster)
        expected = [stage_memory(model, plan.stages, 0, 480, 1, replica=r) for r in range(3)]
        known = [m for m in expected if m is not None]
        # The formula adds the largest workspace to all activations, wherever it falls.
        assert peaks == pytest.approx([m.total for m in known], rel=0.08)
        assert resident == pytest.approx([m.total - m.dynamic for m in known], rel=0.005)
        found[shard] = max(peaks)
    assert found["optimizer"] < 0.85 * found["none"]
