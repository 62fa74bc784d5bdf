"""Plans and batches that do not fit are refused before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from dapple.errors import InputError, PlanError, ScheduleError
from dapple.graph import capture
from dapple.records import Plan
from dapple.runtime.topology import Topology
from tests.runtime import cases
from tests.runtime.threads import on_ranks


def plan_for(replicas: tuple[int, ...], **changes: Any) -> Plan:
    return cases.make_plan(cases.build("mlp"), replicas, 12, 2, **changes)


def with_stage(plan: Plan, **changes: Any) -> Plan:
    first, *rest = plan.stages
    return plan.model_copy(update={"stages": (first.model_copy(update=changes), *rest)})


def test_a_world_size_that_is_not_the_plans() -> None:
    """The message says how many processes to start."""
    with pytest.raises(PlanError, match=r"uses 3 devices but the run has 2 .* with 3 processes"):
        Topology.of(plan_for((2, 1)), 0, 2)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            with_stage(plan_for((1, 1), virtual=2, schedule="interleaved"), shard="optimizer"),
            "a sharded optimizer with virtual stages",
        ),
        (plan_for((1, 1), simulate_only=("half a device",)), "half a device"),
    ],
    ids=["virtual", "named"],
)
def test_a_plan_that_is_for_simulation_only(plan: Plan, words: str) -> None:
    """Each thing that can't be executed yet is refused by name."""
    with pytest.raises(PlanError, match=f"can't execute {words} yet, .* make a plan without it"):
        Topology.of(plan, 0, plan.num_devices)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recompute": ((2, 9),)}, "recompute names layers 2..9 in a stage of layers 0..3"),
        ({"rows": (0.0, 0.0)}, r"rows \[0.0, 0.0\] cannot be shares of replicas"),
        ({"rows": (-1.0, 2.0)}, r"rows \[-1.0, 2.0\] cannot be shares of replicas"),
    ],
    ids=["recompute", "no rows", "negative rows"],
)
def test_a_stage_that_makes_no_sense(change: dict[str, Any], words: str) -> None:
    """Ranges outside of the stage and impossible shares are refused at start."""
    with pytest.raises(PlanError, match=words):
        Topology.of(with_stage(plan_for((2, 1)), **change), 0, 3)


def test_a_plan_for_another_number_of_layers() -> None:
    """Both numbers are in the message."""
    graph = cases.build("gpt")
    with pytest.raises(PlanError, match=f"covers 6 layers but gpt has {graph.num_layers}; make a"):
        on_ranks(graph, plan_for((1,)), lambda trainer: None)


def test_a_plan_for_another_model() -> None:
    """A fingerprint that is not the model's is refused even if the layers are as many."""
    plan = plan_for((1,), model_fingerprint="0123456789abcdef")
    with pytest.raises(
        PlanError, match=r"fingerprint 0123456789abcdef, but mlp has .*; make a plan"
    ):
        on_ranks(cases.build("mlp"), plan, lambda trainer: None)


def test_a_plan_for_this_model() -> None:
    """The model's own fingerprint is taken."""
    graph = cases.build("mlp")
    plan = plan_for((1,), model_fingerprint=graph.fingerprint)
    assert on_ranks(graph, plan, lambda trainer: trainer.rank) == [0]


def test_a_schedule_that_would_deadlock() -> None:
    """A later stage that warms up deeper than an earlier one would wait for ever."""
    plan = plan_for((1, 1))
    first, last = plan.stages
    deep = (first.model_copy(update={"warmup": 1}), last.model_copy(update={"warmup": 2}))
    with pytest.raises(ScheduleError, match="deadlocks"):
        on_ranks(cases.build("mlp"), plan.model_copy(update={"stages": deep}), lambda trainer: None)


@pytest.mark.parametrize("rows", [11, 13, 1])
def test_targets_with_another_number_of_rows(rows: int) -> None:
    """Every rank refuses them, also those that would not read them, so that none waits."""
    inputs, _ = cases.EXAMPLES["mlp"].batch(12, 0)
    _, targets = cases.EXAMPLES["mlp"].batch(rows, 0)
    refused = []

    def work(trainer: Any) -> None:
        with pytest.raises(InputError) as refusal:
            trainer.step(inputs, targets)
        refused.append(str(refusal.value))

    on_ranks(cases.build("mlp"), plan_for((1, 2)), work)
    words = f"targets have shape [{rows}, 4], but the batch has 12 rows; pass one target per row"
    assert refused == [words] * 3


def test_a_wrong_batch_leaves_the_trainer_usable() -> None:
    """After a refused batch the next one trains as if the first had not been."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]

    def work(wrong: bool, trainer: Any) -> dict[str, torch.Tensor]:
        if wrong:
            with pytest.raises(InputError):
                trainer.step(torch.randn(12, 5).double(), None)
        trainer.step(*example.batch(12, 0))
        return dict(trainer.state_dict())

    plain, other = (
        on_ranks(graph, plan_for((1, 2)), lambda t, w=wrong: work(w, t)) for wrong in (False, True)
    )
    for mine, its in zip(plain, other, strict=True):
        assert all(torch.equal(value, its[name]) for name, value in mine.items())


def test_a_loss_that_is_no_scalar() -> None:
    """Named at the first piece, not deep inside of autograd."""
    graph = capture(
        cases.make_model("mlp"),
        cases.EXAMPLES["mlp"].batch(4, 0)[0],
        loss=lambda output, target: F.mse_loss(output, target, reduction="none"),
    )
    plan = cases.make_plan(graph, (1,), 12, 2)
    with pytest.raises(InputError, match=r"returned \[6, 4\] instead of a scalar tensor"):
        on_ranks(graph, plan, lambda t: t.step(*cases.EXAMPLES["mlp"].batch(12, 0)))
