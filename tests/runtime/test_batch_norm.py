"""Batch norm on several replicas is batch norm of one process that takes the micro-batches in turn."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dapple.costs.rows import split_rows
from dapple.errors import InputError, PlanError
from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from dapple.runtime.wiring import check_model
from tests.graph.models import Normed
from tests.runtime.cases import TOLERANCE, global_error, make_plan
from tests.runtime.threads import on_ranks

STEPS = 3
Trained = tuple[dict[str, Tensor], float]
Weight = Callable[[Tensor, Tensor], Any] | None


class Branches(nn.Module):
    """Batch norms that the loss depends on in part or not at all, in regions, without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norms = nn.ModuleList([nn.BatchNorm1d(6, momentum=0.3) for _ in range(3)])
        self.plain = nn.BatchNorm1d(6, affine=False, track_running_stats=False)
        self.middle = nn.Linear(6, 6)
        self.frozen = nn.BatchNorm1d(6).eval()
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.norms[0](self.first(x)))
        with torch.no_grad():
            x = x + self.norms[1](x * x)
        with torch.autocast("cpu", enabled=False):
            unread = self.norms[2](x)
        x = self.frozen(torch.tanh(self.middle(self.plain(x))))
        return self.last(x.unsqueeze(2).tile(1, 1, 2).mean(2)), unread

    def train(self, mode: bool = True) -> Branches:
        super().train(mode)
        self.frozen.eval()
        return self


def mean_square(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(11)
    return kind().double()


@functools.cache
def captured(kind: type[nn.Module]) -> LayerGraph:
    return capture(build(kind), torch.randn(3, 6).double(), loss=mean_square, name=kind.__name__)


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(400 + step)
    x, y = torch.randn(2, rows, 6, generator=random, dtype=torch.float64)
    return x * (1 + torch.arange(rows)[:, None]), y


def one_process(
    kind: type[nn.Module], all_rows: tuple[int, ...], pieces: int, weight: Weight, replicas: int = 1
) -> Trained:
    """State after these steps, and the loss in evaluation.

    With `replicas` the rows of each apart, and the buffers of the first, as with the rule "local".
    """
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, rows in enumerate(all_rows):
        optimizer.zero_grad()
        x, y = batch(rows, step)
        weigh = weight or (lambda inputs, _: len(inputs))
        total = float(weigh(x, y))
        for first, second in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
            sizes = split_rows(len(first), replicas)
            kept: dict[str, Tensor] = {}
            for a, b in zip(first.split(list(sizes)), second.split(list(sizes)), strict=True):
                if len(a):
                    kept = kept or copy.deepcopy(_after(model, a))
                    loss = _weighted(model(a), a, b, weight)
                    if loss is not None:
                        (loss / total).backward()
            if kept:
                for name, buffer in model.named_buffers():
                    buffer.copy_(kept[name])
        optimizer.step()
    state = {n: v.detach().clone() for n, v in model.state_dict().items()}
    with torch.no_grad():
        model.eval()
        x, y = batch(9, 99)
        halves = zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)
        loss = sum(mean_square(model(a), b).item() * len(a) / 9 for a, b in halves if len(a))
    return state, loss


def _after(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The buffers that a forward leaves behind."""
    twin = copy.deepcopy(model)
    twin(x)
    return dict(twin.named_buffers())


def _weighted(output: Any, x: Tensor, y: Tensor, weight: Weight) -> Tensor | None:
    """Sum of the loss over what counts, out of a mean over rows of which some don't."""
    if weight is None:
        return mean_square(output, y) * len(x)
    count = float(weight(x, y))
    return masked_loss(output, y) * count if count else None


def counted(x: Tensor, y: Tensor) -> Tensor:
    """Rows whose target is positive in the first column count."""
    return (y[:, 0] > 0).sum()


@functools.cache
def masked_graph() -> LayerGraph:
    return capture(build(Normed), torch.randn(3, 6).double(), loss=masked_loss, name="masked")


def masked_loss(output: Any, target: Tensor) -> Tensor:
    value = output[0] if isinstance(output, tuple) else output
    keep = target[:, 0] > 0
    return F.mse_loss(value[keep], target[keep])


def train(
    graph: LayerGraph,
    replicas: tuple[int, ...],
    all_rows: tuple[int, ...],
    micro_batches: int,
    schedule: str = "early-backward",
    changes: tuple[dict[str, Any], ...] = (),
    **arguments: Any,
) -> list[Trained]:
    plan = make_plan(graph, replicas, all_rows[0], micro_batches, schedule)
    if changes:
        pairs = zip(plan.stages, changes, strict=True)
        stages = tuple(stage.model_copy(update=change) for stage, change in pairs)
        plan = plan.model_copy(update={"stages": stages})

    def work(trainer: Trainer) -> Trained:
        for step, rows in enumerate(all_rows):
            trainer.step(*batch(rows, step))
        state = {n: v.clone() for n, v in trainer.state_dict().items()}
        return state, trainer.evaluate(*batch(9, 99))

    return on_ranks(graph, plan, work, **arguments)


def check(results: list[Trained], wanted: Trained) -> None:
    """All as wanted, and replicas with the same bits."""
    assert global_error([state for state, _ in results], wanted[0]) < TOLERANCE
    values = [value for _, value in results]
    assert values == pytest.approx([wanted[1]] * len(values), rel=TOLERANCE)
    for state, _ in results:
        for other, _ in results:
            common = state.keys() & other.keys()
            assert all(torch.equal(state[name], other[name]) for name in common)


PLANS = [
    ((2,), "early-backward"),
    ((3, 2), "early-backward"),
    ((1, 3), "gpipe"),
    ((4, 1), "early-backward"),
    ((2, 1, 3), "gpipe"),
]


@pytest.mark.parametrize(("replicas", "schedule"), PLANS, ids=str)
@pytest.mark.parametrize("kind", [Normed, Branches])
def test_weights_statistics_and_evaluation_equal_one_process(
    kind: type[nn.Module], replicas: tuple[int, ...], schedule: str
) -> None:
    """Unequal replicas, replicas without rows (4 of 3 and 2 rows), norms the loss ignores."""
    results = train(captured(kind), replicas, (8,) * STEPS, 3, schedule)
    check(results, one_process(kind, (8,) * STEPS, 3, None))
    counts = {n: int(v) for s, _ in results for n, v in s.items() if n.endswith("tracked")}
    assert {n for n, v in counts.items() if v != 3 * STEPS} <= {"frozen.num_batches_tracked"}


@pytest.mark.parametrize("kind", [Normed, Branches])
def test_a_forward_that_runs_again_adds_up_and_updates_nothing(kind: type[nn.Module]) -> None:
    """Recomputed stages and ranges with several replicas: the same bits."""
    graph = captured(kind)
    wanted = train(graph, (2, 3), (8,) * STEPS, 3)
    stop = graph.num_layers
    for changes in (({"recompute": True},) * 2, ({}, {"recompute": ((stop - 1, stop),)})):
        for one, other in zip(
            train(graph, (2, 3), (8,) * STEPS, 3, changes=changes), wanted, strict=True
        ):
            assert all(torch.equal(value, other[0][name]) for name, value in one[0].items())


def test_unequal_shares_of_the_rows() -> None:
    """The first replica has no rows of some micro-batches, and its buffers are right all the same."""
    shares = {"rows": (1.0, 9.0, 2.0)}
    results = train(captured(Normed), (3,), (8,) * STEPS, 3, changes=(shares,))
    check(results, one_process(Normed, (8,) * STEPS, 3, None))


@pytest.mark.parametrize("replicas", [(3,), (2, 3)], ids=str)
def test_rows_without_weight_still_count_in_the_statistics(replicas: tuple[int, ...]) -> None:
    """Their gradient is what the other rows' losses make of them, on pieces without weight too."""
    results = train(masked_graph(), replicas, (7, 7, 5), 2, weight=counted)
    wanted, _ = one_process(Normed, (7, 7, 5), 2, counted)
    assert global_error([state for state, _ in results], wanted) < TOLERANCE


@pytest.mark.parametrize("replicas", [(2,), (2, 3)], ids=str)
def test_the_local_rule_is_that_of_distributed_data_parallel(replicas: tuple[int, ...]) -> None:
    """Statistics of each replica's rows, and in the end the first replica's buffers on all."""
    graph = captured(Normed)
    if len(set(replicas)) == 1:
        wanted = one_process(Normed, (12,) * STEPS, 2, None, replicas[0])
        check(train(graph, replicas, (12,) * STEPS, 2, batch_norm="local"), wanted)
    else:
        results = train(graph, replicas, (12,) * STEPS, 2, batch_norm="local")
        other = train(graph, replicas, (12,) * STEPS, 2)
        assert not torch.equal(results[0][0]["layers.0.0.weight"], other[0][0]["layers.0.0.weight"])
        assert all(torch.equal(v, results[1][0][n]) for n, v in results[0][0].items())


@pytest.mark.parametrize("replicas", [(1,), (2,)], ids=str)
@pytest.mark.parametrize("rule", ["global", "local"])
def test_one_value_per_channel_is_refused(replicas: tuple[int, ...], rule: Any) -> None:
    """Eager torch refuses it as well; the graph alone would write NaN into the variance."""
    with pytest.raises(
        InputError, match=r"one value per channel, which .* plan fewer micro-batches"
    ):
        train(captured(Normed), replicas, (3,), 2, batch_norm=rule)


def test_an_unknown_rule() -> None:
    with pytest.raises(InputError, match='batch_norm "sync" is unknown; known: "global", "local"'):
        train(captured(Normed), (1,), (8,), 2, batch_norm="sync")


def test_mixed_precision_keeps_statistics_equal() -> None:
    """Under autocast the statistics are in float32, and replicas stay bitwise equal."""
    torch.manual_seed(0)
    graph = capture(Normed(), torch.randn(3, 6), loss=mean_square)
    plan = make_plan(graph, (3,), 8, 2)
    x, y = (t.float() for t in batch(8, 0))

    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(x, y)
        return trainer.state_dict()

    states = on_ranks(graph, plan, work, precision="bf16")
    (plain,) = on_ranks(graph, make_plan(graph, (1,), 8, 2), work, precision="bf16")
    for name, value in states[0].items():
        assert torch.equal(value, states[2][name])
        assert torch.allclose(value.float(), plain[name].float(), rtol=0.05, atol=0.05), name


class Counting(nn.Module):
    """Counts its calls in a buffer, and with `mean` what it saw."""

    def __init__(self, mean: bool = False, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.mean, self.norm = nn.Linear(4, 4), mean, norm
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        x = self.linear(x)
        if self.norm is not None:
            x = self.norm(x.unsqueeze(1).tile(1, 4, 1)).sum(1)
        if self.mean:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(x.mean(0))
        return x


def test_a_counter_is_the_same_on_all_replicas() -> None:
    """Micro-batches count, also on a replica that has no rows of some."""
    graph = capture(Counting(), torch.randn(4, 4), loss=F.mse_loss)
    plan = make_plan(graph, (3,), 5, 2)
    x = torch.randn(5, 4)

    def work(trainer: Trainer) -> int:
        trainer.step(x, x)
        trainer.step(x, x)
        return int(trainer.state_dict()["calls"])

    assert on_ranks(graph, plan, work) == [4, 4, 4]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Counting(mean=True), "seen"),
        (Counting(norm=nn.InstanceNorm1d(4, track_running_stats=True)), "norm.running_mean"),
    ],
    ids=["own", "instance norm"],
)
def test_a_buffer_updated_from_rows_needs_one_replica(model: nn.Module, name: str) -> None:
    """Replicas would write different values, and no rule says which is right."""
    graph = capture(model, torch.randn(4, 4), loss=F.mse_loss)
    check_model(graph, make_plan(graph, (1,), 8, 2))
    with pytest.raises(PlanError, match=rf'stage 0 has 2 replicas, .* updates buffer "{name}"'):
        check_model(graph, make_plan(graph, (2,), 8, 2))


def test_a_region_that_only_writes_a_buffer_is_kept() -> None:
    """Nobody reads what a no_grad region returns, and it has an effect all the same."""
    torch.manual_seed(0)
    graph = capture(Counting(mean=True), torch.randn(4, 4), loss=F.mse_loss)
    torch.manual_seed(0)
    plain, x = Counting(mean=True), torch.randn(4, 4)
    plain(x)
    (state,) = on_ranks(
        graph, make_plan(graph, (1,), 4, 1), lambda t: (t.step(x, x), t.state_dict())[1]
    )
    assert torch.allclose(state["seen"], plain.seen)
    assert state["seen"].any()


def test_batch_norm_in_a_region_is_no_mixing_of_rows() -> None:
    """The probe leaves batch norms out, also those in an autocast or no_grad region."""
    assert captured(Branches).notes == ()
