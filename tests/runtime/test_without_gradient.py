"""What the loss does not depend on has no gradient, on every stage, as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dapple.errors import InputError, RunError
from dapple.graph import LayerGraph, capture
from dapple.runtime.stage import StageRunner
from dapple.runtime.trainer import Trainer
from dapple.zoo.gpt import GPT, next_byte_loss
from tests.runtime import cases
from tests.runtime.cases import Run
from tests.runtime.threads import on_ranks

ROWS = 8
MARK = 1000.0


class Sideways(nn.Module):
    """Hands on a second tensor past all cuts, and a tensor without rows.

    Args:
        dead: a column of the second is zero, where the gradient of its square root is infinite.
    """

    def __init__(self, dead: bool) -> None:
        super().__init__()
        self.side = nn.Linear(4, 4)
        self.shift = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])
        self.head = nn.Linear(4, 2)
        if dead:
            nn.init.zeros_(self.side.weight)
            nn.init.zeros_(self.side.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side = torch.sqrt(self.side(x).abs())
        shift = self.shift.weight.sum(0)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x), torch.sin(side) + shift


def main_only(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Does not read the second output."""
    return F.mse_loss(output[0], target)


def now_and_then(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Reads the second output of some batches only: those whose targets are marked."""
    if bool((target > 100).all()):
        return main_only(output, target - MARK) + output[1].square().mean()
    return main_only(output, target)


def captured(loss: Any, dead: bool) -> tuple[LayerGraph, nn.Module]:
    torch.manual_seed(0)
    plain = Sideways(dead).double()
    torch.manual_seed(0)
    return capture(Sideways(dead).double(), torch.randn(4, 4).double(), loss=loss), plain


RUNS = [
    Run("", (1, 1), 2, ROWS),
    Run("", (2, 1), 3, ROWS),
    Run("", (1, 3), 2, ROWS),
    Run("", (1, 2, 1), 3, ROWS),
    Run("", (1, 1), 4, ROWS, schedule="interleaved", virtual=2),
    Run("", (1, 1, 1), 4, ROWS, schedule="zero-bubble"),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r.schedule}-{r.replicas}")
def test_what_an_unused_tensor_comes_from_is_left_alone(run: Run) -> None:
    """Neither decay nor momentum moves it, and no zero times infinity makes it NaN."""
    graph, plain = captured(main_only, dead=True)
    torch.manual_seed(1)
    batches = [(torch.randn(ROWS, 4).double(), torch.randn(ROWS, 2).double()) for _ in range(3)]
    held(graph, plain, run, batches, "adamw")
    assert plain.get_parameter("side.weight").grad is None


@pytest.mark.parametrize("run", RUNS[:4], ids=lambda r: f"{r.schedule}-{r.replicas}")
def test_a_tensor_that_some_steps_use_gets_gradients_in_those(run: Run) -> None:
    """Whether there is one is told per micro-batch, not once for all."""
    graph, plain = captured(now_and_then, dead=False)
    torch.manual_seed(1)
    batches = [(torch.randn(ROWS, 4).double(), torch.randn(ROWS, 2).double()) for _ in range(4)]
    for used in (1, 3):
        batches[used][1].add_(MARK)
    held(graph, plain, run, batches, "momentum")


def held(
    graph: LayerGraph,
    plain: nn.Module,
    run: Run,
    batches: Sequence[tuple[Tensor, Tensor]],
    optimizer: str,
) -> None:
    """A plan's parameters after some steps are those of one process."""
    update = cases.DECAYED[optimizer](list(plain.parameters()))
    assert graph.loss is not None
    for x, y in batches:
        update.zero_grad()
        graph.loss(plain(x), y).backward()
        update.step()

    def work(trainer: Trainer) -> dict[str, Tensor]:
        for x, y in batches:
            trainer.step(x, y)
        return {n: v.clone() for n, v in trainer.state_dict().items()}

    plan = cases.make_plan(
        graph, run.replicas, ROWS, run.num_micro_batches, schedule=run.schedule, virtual=run.virtual
    )
    states = on_ranks(graph, plan, work, cases.DECAYED[optimizer])
    assert cases.global_error(states, dict(plain.state_dict())) < 1e-12


def detached(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return main_only(output, target).detach()


def leaf(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return detached(output, target).requires_grad_()


@pytest.mark.parametrize(
    ("loss", "replicas"), [(detached, (1, 1)), (leaf, (1, 1)), (detached, (2,)), (leaf, (1, 2))]
)
def test_a_loss_that_depends_on_nothing_is_an_error_on_every_rank(loss: Any, replicas: Any) -> None:
    """Nothing is updated; one process could not start a backward from it, or would do nothing."""
    graph, _ = captured(loss, dead=False)

    def work(trainer: Trainer) -> dict[str, Tensor]:
        before = {n: v.clone() for n, v in trainer.state_dict().items()}
        with pytest.raises(InputError, match="the loss of no row depends on"):
            trainer.step(torch.randn(ROWS, 4).double(), torch.randn(ROWS, 2).double())
        assert all(v.equal(before[n]) for n, v in trainer.state_dict().items())
        return before

    on_ranks(graph, cases.make_plan(graph, replicas, ROWS, 2), work, cases.DECAYED["adamw"])


def constant_at_times(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Of pieces without a positive target a number that only looks as if it had a gradient."""
    if bool((target > 0).any()):
        return main_only(output, target)
    return torch.zeros((), dtype=torch.float64, requires_grad=True)


def test_a_piece_whose_loss_is_a_constant_adds_no_gradient() -> None:
    """Others of its step do, as in one process that takes the pieces one after the other."""
    graph, plain = captured(constant_at_times, dead=False)
    x, y = torch.randn(ROWS, 4).double(), torch.rand(ROWS, 2).double()
    y[: ROWS // 2] -= 2
    for part in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
        (constant_at_times(plain(x[part]), y[part]) / 2).backward()
    cases.DECAYED["adamw"](list(plain.parameters())).step()

    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(x, y)
        return trainer.state_dict()

    plan = cases.make_plan(graph, (1, 1), ROWS, 2)
    states = on_ranks(graph, plan, work, cases.DECAYED["adamw"])
    assert cases.global_error(states, dict(plain.state_dict())) < 1e-12


def uses(graph: LayerGraph) -> set[tuple[str, int]]:
    """All that could be certain."""
    return {(t.name, layer) for t in graph.tensors() if t.needs_grad for layer in t.consumers}


class EarlyToo(nn.Module):
    """Returns what its first layer makes as well, as with output_hidden_states=True."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = x = torch.tanh(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        return self.head(x), early


@pytest.mark.parametrize("run", RUNS[3:], ids=lambda r: f"{r.schedule}-{r.replicas}")
def test_a_tensor_that_two_stages_read_may_have_a_gradient_from_one(run: Run) -> None:
    """The use by the next stage is certain, that by the last one is not."""
    torch.manual_seed(0)
    plain = EarlyToo().double()
    torch.manual_seed(0)
    graph = capture(EarlyToo().double(), torch.randn(4, 4).double(), loss=main_only)
    torch.manual_seed(1)
    batches = [(torch.randn(ROWS, 4).double(), torch.randn(ROWS, 2).double()) for _ in range(3)]
    held(graph, plain, run, batches, "momentum")


class ExitToo(EarlyToo):
    """Returns a second head, on the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.exit = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.blocks[0](x))
        early = self.exit(x)
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        return self.head(x), early


def in_place(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Writes into an output that an earlier stage has made."""
    return main_only(output, target) + output[1].sub_(target).square().mean()


def test_a_loss_may_write_into_what_an_earlier_stage_returns() -> None:
    """On its rank that tensor is where autograd starts, which must not be written into."""
    torch.manual_seed(0)
    plain = ExitToo().double()
    torch.manual_seed(0)
    graph = capture(ExitToo().double(), torch.randn(4, 4).double(), loss=in_place)
    batches = [(torch.randn(ROWS, 4).double(), torch.randn(ROWS, 2).double()) for _ in range(2)]
    held(graph, plain, Run("", (1, 1, 1), 2, ROWS), batches, "momentum")


class NormAside(nn.Module):
    """A batch norm in a branch that the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.side, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        return self.head(x), self.norm(self.side(x))


@pytest.mark.parametrize("schedule", ["early-backward", "zero-bubble"])
def test_what_stands_before_a_batch_norm_that_the_loss_leaves_out_is_left_alone(
    schedule: str,
) -> None:
    """Its backward runs on replicas whatever the loss, and has no gradient to give."""
    torch.manual_seed(0)
    plain = NormAside().double()
    torch.manual_seed(0)
    graph = capture(NormAside().double(), torch.randn(4, 4).double(), loss=main_only)
    run = Run("", (1, 2), 1, ROWS, schedule=schedule)
    torch.manual_seed(1)
    batches = [(torch.randn(ROWS, 4).double(), torch.randn(ROWS, 2).double()) for _ in range(3)]
    held(graph, plain, run, batches, "adamw")


def test_only_what_every_loss_depends_on_is_certain() -> None:
    """The tensor beside the chain is not, since a loss may leave it out."""
    graph, _ = captured(main_only, dead=True)
    certain = graph.certain_gradients()
    doubtful = uses(graph) - certain
    assert certain == set()  # a loss of the second output alone needs none of the chain either
    assert "sqrt" in {name for name, _ in doubtful}


def test_a_chain_is_certain_so_that_it_costs_no_flags() -> None:
    """The models that most people train have one output."""
    model = GPT(vocab=11, width=16, layers=3, heads=2, context=8)
    graph = capture(model, torch.randint(11, (4, 8)), loss=next_byte_loss)
    assert graph.certain_gradients() == uses(graph)


def test_with_a_loss_of_its_own_other_outputs_of_a_model_raise_no_doubt() -> None:
    """Nothing but that loss is trained on."""
    inputs = {"x": torch.randn(4, 6), "labels": torch.randint(3, (4,))}
    graph = capture(cases.LossInside(), inputs)
    assert graph.certain_gradients() == uses(graph)


class Positive(nn.Module):
    """Reads rows of a table by how many of its inputs are positive: no gradient comes back to them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.table((x > 0).sum(-1))
        return result


def choosing() -> LayerGraph:
    model = nn.Sequential(nn.Linear(4, 4), Positive(), nn.Linear(4, 2))
    return capture(model, torch.randn(4, 4), loss=F.mse_loss)


def test_a_tensor_that_only_chooses_is_not_certain() -> None:
    """An operator without gradient lies behind it, whatever the loss."""
    graph = choosing()
    first = [t.name for t in graph.tensors() if t.producer == 0]
    assert first
    assert not set(first) & {name for name, _ in graph.certain_gradients()}


class ChooseAndAdd(nn.Module):
    """What its first layer makes goes on in two ways, of which one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.table = nn.Linear(4, 4), nn.Linear(4, 4), Positive()

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        result: Tensor = self.table(first) + second
        return result


def test_a_gradient_that_lacks_against_all_certainty_is_an_error() -> None:
    """Zeros in its place could be wrong without a word."""
    graph = capture(ChooseAndAdd(), torch.randn(4, 4), loss=F.mse_loss)
    program = graph.stage(2, graph.num_layers)
    names = [tensor.name for tensor in program.reads]
    assert len(names) == 2
    runner = StageRunner(program, certain=names)
    received = {t.name: torch.randn(t.shape_for(2)) for t in program.reads}
    _, results = runner.forward(0, 2, {}, received)
    runner.set_loss(0, F.mse_loss(results[0], torch.randn(2, 4)))
    with pytest.raises(RunError, match="no gradient"):
        runner.backward(0, [])
