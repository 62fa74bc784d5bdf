"""Stages that `torch.compile` compiles. Inductor takes minutes on a busy machine: not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dapple.errors import InputError
from dapple.graph import capture
from dapple.runtime.trainer import Trainer
from tests.graph.models import CASES
from tests.runtime import cases
from tests.runtime.threads import on_ranks


def counting(compilations: list[int]) -> Any:
    """A backend that notes what it compiles."""

    def backend(module: Any, inputs: Any) -> Any:
        compilations.append(len(inputs))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    return backend


def test_a_compiled_stage_trains_and_evaluates_like_a_plain_one() -> None:
    """Across a cut, in batches of other sizes too, and without compiling again for each."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]
    compilations: list[int] = []
    backend = counting(compilations)

    def work(trainer: Trainer) -> Any:
        for step, rows in enumerate((12, 31)):
            trainer.step(*example.batch(rows, step))
        return trainer.state_dict(), float(trainer.evaluate(*example.batch(7, 8)))

    plan = cases.make_plan(graph, (1, 1), 12, 3)
    plain = on_ranks(graph, plan, work)
    found = on_ranks(graph, plan, work, compile={"backend": backend})
    assert len(compilations) == 4  # training and evaluation of two stages
    weights = {name: value for state, _ in plain for name, value in state.items()}
    assert cases.global_error([state for state, _ in found], weights) < cases.TOLERANCE
    assert [loss for _, loss in found] == pytest.approx([plain[0][1]] * 2, rel=1e-12)


def test_virtual_stages_are_compiled_each() -> None:
    """Two of a rank train as uncompiled ones do."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]
    plan = cases.make_plan(graph, (1, 1), 12, 3, schedule="interleaved", virtual=2)

    def work(trainer: Trainer) -> Any:
        trainer.step(*example.batch(12, 0))
        return trainer.state_dict()

    plain = on_ranks(graph, plan, work)
    weights = {name: value for state in plain for name, value in state.items()}
    compilations: list[int] = []
    found = on_ranks(graph, plan, work, compile={"backend": counting(compilations)})
    assert len(compilations) == 4
    assert cases.global_error(found, weights) < cases.TOLERANCE


def broken(module: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler on this machine")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": broken}, "stage 0 can't be compiled: .*no compiler.*; leave out compile, or"),
        ({"backend": "none such"}, "torch.compile refuses .*none such"),
        ({"colour": 3}, "torch.compile refuses .*colour"),
    ],
    ids=["backend fails", "no such backend", "no such option"],
)
def test_what_can_not_be_compiled_is_said(options: dict[str, Any], words: str) -> None:
    """Instead of going on uncompiled: every rank stops."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]
    plan = cases.make_plan(graph, (1,), 12, 2)
    with pytest.raises(InputError, match=words):
        on_ranks(graph, plan, lambda t: t.step(*example.batch(12, 0)), compile=options)


def test_a_stage_that_recomputes_is_not_compiled() -> None:
    """Refused by its number."""
    graph = cases.build("mlp")
    plan = cases.make_plan(graph, (1, 1), 12, 2)
    first, last = plan.stages
    plan = plan.model_copy(update={"stages": (first.model_copy(update={"recompute": True}), last)})
    with pytest.raises(InputError, match="stage 0 recomputes layers, which can't be compiled"):
        on_ranks(graph, plan, lambda trainer: None, compile=True)


def test_batch_norms_are_compiled_where_each_replica_has_its_own() -> None:
    """Their running statistics too; those that replicas compute together are refused."""
    case = CASES["normed"]
    graph = capture(case.model(), case.batch(4)[0], loss=case.loss)

    def work(trainer: Trainer) -> Any:
        for step in range(2):
            trainer.step(*case.batch(8, step))
        return trainer.state_dict()

    plan = cases.make_plan(graph, (1,), 8, 2)
    (plain,) = on_ranks(graph, plan, work)
    found = on_ranks(graph, plan, work, compile={"backend": "aot_eager"})
    assert cases.global_error(found, plain) < cases.TOLERANCE
    with pytest.raises(InputError, match="stage 0 holds batch norms over the rows of several"):
        on_ranks(graph, cases.make_plan(graph, (2,), 8, 2), work, compile=True)
