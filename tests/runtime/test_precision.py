"""Autocast on all stages, and one loss scale for them: as on one process under autocast."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dapple.errors import InputError
from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from tests.graph import checks
from tests.graph.models import CASES
from tests.runtime import cases
from tests.runtime.threads import on_ranks, sgd

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS, STEPS = 8, 3


def single(tree: Any) -> Any:
    """float64 as float32: autocast leaves double alone."""
    return pytree.tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, tree)


def model_of(name: str) -> nn.Module:
    return CASES[name].model().float()


def batch_of(name: str, step: int) -> tuple[Any, Any]:
    return single(CASES[name].batch(ROWS, step))


@functools.cache
def captured(name: str) -> LayerGraph:
    inputs = single(CASES[name].batch(4)[0])
    return capture(model_of(name), inputs, loss=CASES[name].loss, name=name)


def one_process(
    name: str,
    precision: str,
    scaler: Any = None,
    steps: int = STEPS,
    scales: list[float] | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a plain loop under autocast, with torch's own scaler; its scales."""
    model = model_of(name)
    optimizer = sgd(model.parameters())
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(name, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=TYPES[precision]):
            loss = CASES[name].loss(checks.call(model, inputs), targets)
        scaler.scale(loss.float()).backward()
        scaler.step(optimizer)
        scaler.update()
        if scales is not None:
            scales.append(scaler.get_scale())
        losses.append(loss.item())
    return {n: v.detach() for n, v in model.state_dict().items()}, losses


def trained(name: str, steps: int, trainer: Trainer) -> tuple[dict[str, Tensor], list[float]]:
    losses = [trainer.step(*batch_of(name, step)).loss for step in range(steps)]
    return trainer.state_dict(), losses


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt", "bf16"),
        ("gpt", "fp16"),
        ("skip", "bf16"),
        ("int and bool", "fp16"),
        ("tuple layers", "bf16"),
        ("no rows", "fp16"),
    ],
)
def test_stages_compute_what_one_process_computes_under_autocast(name: str, precision: str) -> None:
    """Tensors cross the cuts in the type that autocast gives them: with one micro-batch the
    result is that of one process, not only near it.
    """
    graph = captured(name)
    replicas = [1] * min(3, graph.num_layers)
    plan = cases.make_plan(graph, replicas, ROWS, 1)
    work = functools.partial(trained, name, STEPS)
    results = on_ranks(graph, plan, work, precision=precision)
    weights, losses = one_process(name, precision, torch.amp.GradScaler("cpu"))
    assert cases.global_error([state for state, _ in results], weights) < 1e-6
    assert [found for _, found in results] == [pytest.approx(losses, rel=1e-6)] * len(results)


@pytest.mark.parametrize(
    ("replicas", "precision"), [((2, 3), "bf16"), ((1, 2, 1), "fp16")], ids=str
)
def test_micro_batches_and_replicas_differ_by_rounding_only(
    replicas: tuple[int, ...], precision: str
) -> None:
    """Sums in another order, in three digits."""
    graph = captured("gpt")
    plan = cases.make_plan(graph, replicas, ROWS, 4)
    work = functools.partial(trained, "gpt", STEPS)
    results = on_ranks(graph, plan, work, precision=precision)
    weights, losses = one_process("gpt", precision)
    assert cases.global_error([state for state, _ in results], weights) < 2e-3
    assert [found for _, found in results] == [pytest.approx(losses, rel=2e-3)] * len(results)


def test_recomputed_layers_run_under_autocast_again() -> None:
    """Bitwise the numbers of layers that keep their activations."""
    graph = captured("gpt")
    plan = cases.make_plan(graph, (1, 1), ROWS, 2)
    first, last = plan.stages
    again = plan.model_copy(update={"stages": (first.model_copy(update={"recompute": True}), last)})
    work = functools.partial(trained, "gpt", STEPS)
    kept, recomputed = (on_ranks(graph, p, work, precision="bf16") for p in (plan, again))
    for (mine, _), (its, _) in zip(kept, recomputed, strict=True):
        assert all(torch.equal(value, its[name]) for name, value in mine.items())


def test_what_crosses_a_cut_is_half_as_wide() -> None:
    """And what autocast leaves in float32 stays so: the residual stream of a GPT."""
    wanted = {"int and bool": torch.bfloat16, "gpt": torch.float32}
    for name, kind in wanted.items():
        graph = captured(name)
        plan = cases.make_plan(graph, (1, 1), ROWS, 2)
        found = on_ranks(
            graph,
            plan,
            lambda t: t.parts.training.programs[t.topology.stage].reads,
            precision="bf16",
        )[1]
        assert {t.dtype for t in found if t.needs_grad} == {kind}


class _Casts(TorchDispatchMode):
    """Counts the matrices that are cast to bf16."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            self.count += isinstance(args[0], nn.Parameter) and args[0].dim() == 2
        return func(*args, **kwargs)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_weights_are_cast_once_a_step(micro_batches: int) -> None:
    """However many micro-batches are in flight, they share one copy of each weight."""
    graph = captured("no parameters first")
    matrices = sum(p.dim() == 2 for p in model_of("no parameters first").parameters())

    def work(trainer: Trainer) -> int:
        trainer.step(*batch_of("no parameters first", 0))
        with _Casts() as casts:
            trainer.step(*batch_of("no parameters first", 1))
        return casts.count

    plan = cases.make_plan(graph, (1,), ROWS, micro_batches, schedule="gpipe")
    assert on_ranks(graph, plan, work, precision="bf16") == [matrices]


def test_evaluation_runs_under_autocast_too() -> None:
    """The loss of one process under autocast, on every rank."""
    graph = captured("gpt")
    inputs, targets = batch_of("gpt", 5)
    model = model_of("gpt").eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = CASES["gpt"].loss(model(inputs), targets).item()
    plan = cases.make_plan(graph, (1, 1, 1), ROWS, 1)
    found = on_ranks(graph, plan, lambda t: t.evaluate(inputs, targets), precision="bf16")
    assert found == [pytest.approx(wanted, rel=1e-6)] * 3


def test_the_scale_moves_as_torchs_own_does() -> None:
    """From far too large down until nothing overflows, then up again; skipped steps change no
    weight on any rank.
    """
    settings: dict[str, Any] = {"init_scale": 2.0**24, "growth_interval": 2}
    reference = torch.amp.GradScaler("cpu", **settings)
    wanted: list[float] = []
    weights, _ = one_process("skip", "fp16", reference, 14, wanted)

    def work(trainer: Trainer) -> tuple[dict[str, Tensor], list[float], list[bool]]:
        scales, skipped = [], []
        for step in range(14):
            skipped.append(trainer.step(*batch_of("skip", step)).skipped)
            scales.append(trainer.scaler.get_scale())
        return trainer.state_dict(), scales, skipped

    graph = captured("skip")
    plan = cases.make_plan(graph, (1, 1, 1), ROWS, 1)
    results = run_with_scalers(graph, plan, work, settings)
    before = [2.0**24, *wanted[:-1]]
    falls = [after < first for first, after in zip(before, wanted, strict=True)]
    assert True in falls
    assert any(after > first for first, after in zip(before, wanted, strict=True))
    assert [scales for _, scales, _ in results] == [wanted] * 3
    assert [skipped for _, _, skipped in results] == [falls] * 3
    assert cases.global_error([state for state, _, _ in results], weights) < 1e-6


def run_with_scalers(graph: Any, plan: Any, work: Any, settings: dict[str, Any]) -> list[Any]:
    """Each rank with a scaler of its own."""

    def start(trainer: Trainer) -> Any:
        trainer.scaler.load_state_dict(torch.amp.GradScaler("cpu", **settings).state_dict())
        return work(trainer)

    return on_ranks(graph, plan, start, precision="fp16")


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_on_one_rank_skips_the_step_on_all(value: float) -> None:
    """No rank's weights move, all lower the scale, and the next step trains as if it had not been."""
    graph = captured("gpt")

    def work(planted: bool, trainer: Trainer) -> tuple[list[bool], float, dict[str, Tensor]]:
        skipped = []
        if planted:
            before = {n: v.clone() for n, v in trainer.state_dict().items()}
            first = next(iter(trainer.parts.trainable().values()))
            hook = first.register_hook(lambda g: g * value) if trainer.rank == 1 else None
            skipped.append(trainer.step(*batch_of("gpt", 0)).skipped)
            if hook is not None:
                hook.remove()
            assert all(torch.equal(v, before[n]) for n, v in trainer.state_dict().items())
        skipped.append(trainer.step(*batch_of("gpt", 1)).skipped)
        return skipped, trainer.scaler.get_scale(), trainer.state_dict()

    plan = cases.make_plan(graph, (1, 1, 1), ROWS, 2)
    found, plain = (
        run_with_scalers(graph, plan, functools.partial(work, planted), {"init_scale": scale})
        for planted, scale in ((True, 2048.0), (False, 1024.0))
    )
    assert [(skipped, scale) for skipped, scale, _ in found] == [([True, False], 1024.0)] * 3
    for (_, _, mine), (_, _, its) in zip(found, plain, strict=True):
        assert all(torch.equal(value, its[name]) for name, value in mine.items())


def test_the_norm_to_clip_by_is_without_the_scale() -> None:
    """Also of gradients that two calls added up."""
    graph = captured("gpt")

    def work(trainer: Trainer) -> float | None:
        trainer.step(*batch_of("gpt", 0), update=False)
        return trainer.step(*batch_of("gpt", 1)).gradient_norm

    plan = cases.make_plan(graph, (1, 2), ROWS, 2)
    plain = on_ranks(graph, plan, work, clip_norm=1.0)
    scaled = on_ranks(graph, plan, work, clip_norm=1.0, precision="fp16")
    assert scaled == [pytest.approx(plain[0], rel=1e-2)] * 3


def test_a_precision_that_is_unknown_is_refused() -> None:
    """With those that are known."""
    graph = captured("gpt")
    plan = cases.make_plan(graph, (1,), ROWS, 2)
    with pytest.raises(InputError, match=r'precision "fp8" is unknown; known: "float32", "bf16"'):
        on_ranks(graph, plan, lambda trainer: None, precision="fp8")
