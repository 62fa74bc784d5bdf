"""Silent faults that an outsider found, each now right or named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dapple.errors import CaptureError, InputError
from dapple.graph import capture
from dapple.runtime.trainer import Trainer
from tests.runtime import cases
from tests.runtime.threads import OwnCopy, ThreadTransport, on_ranks, run_threads, sgd


class UnusedHead(nn.Module):
    """A second head whose output the loss does not read, and a prefix without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.head, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            x = self.prefix(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x), self.other(x)


def first_output(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("optimizer", list(cases.DECAYED))
def test_parameters_without_gradient_are_not_decayed(optimizer: str, replicas: Any) -> None:
    """An optimizer skips them on one device, so it does in a pipeline."""
    torch.manual_seed(0)
    plain = UnusedHead().double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 2).double()
    torch.manual_seed(0)
    graph = capture(UnusedHead().double(), x[:4], loss=first_output)
    update = cases.DECAYED[optimizer](list(plain.parameters()))
    for _ in range(3):
        update.zero_grad()
        first_output(plain(x), y).backward()
        update.step()

    def work(trainer: Trainer) -> dict[str, Tensor]:
        for _ in range(3):
            trainer.step(x, y)
        return {n: v.clone() for n, v in trainer.state_dict().items()}

    plan = cases.make_plan(graph, replicas, 8, 2)
    states = on_ranks(graph, plan, work, cases.DECAYED[optimizer])
    assert cases.global_error(states, dict(plain.state_dict())) < 1e-12


def head_only(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for name, p in parameters.named() if "head" in name], lr=0.1)


def test_an_optimizer_that_takes_no_parameter_of_a_stage_leaves_it_as_it_is() -> None:
    """The factory chooses among the parameters; a stage with none of the chosen trains nothing."""
    torch.manual_seed(0)
    plain = UnusedHead().double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 2).double()
    torch.manual_seed(0)
    graph = capture(UnusedHead().double(), x[:4], loss=first_output)
    first_output(plain(x), y).backward()
    torch.optim.SGD(plain.head.parameters(), lr=0.1).step()

    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(x, y)
        return {n: v.clone() for n, v in trainer.state_dict().items()}

    states = on_ranks(graph, cases.make_plan(graph, (2, 1), 8, 2), work, head_only)
    assert cases.global_error(states, dict(plain.state_dict())) < 1e-12


def test_an_optimizer_that_takes_no_parameter_of_any_stage_is_refused() -> None:
    """One process would refuse it as well."""
    graph = capture(UnusedHead(), torch.randn(4, 4), loss=first_output)
    plan = cases.make_plan(graph, (1, 1), 8, 2)

    def work(trainer: Trainer) -> None:
        with pytest.raises(InputError, match="no rank has a parameter to update"):
            trainer.step(torch.randn(8, 4), torch.randn(8, 2))

    on_ranks(graph, plan, work, lambda p: torch.optim.SGD([q for q in p if q.dim() == 7]))


def test_a_loss_that_reads_parameters_of_other_stages_is_refused() -> None:
    """They are not on its rank, and what stands in for them says so when it is used."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    graph = capture(model, torch.randn(4, 4), loss=F.mse_loss)
    last = graph.stage(2, 4)
    graph.release({id(p) for p in last.module.parameters()})
    with pytest.raises(InputError, match="a parameter of another stage"):
        sum(p.pow(2).sum() for p in model.parameters())


class WithHook(nn.Module):
    """Hooks into the backward in one way or another."""

    def __init__(self, hook: Callable[[nn.Module, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.hook is not None:
            self.hook(self, x)
        return self.last(x)


def test_a_tensor_hook_is_refused() -> None:
    """Export keeps the forward and loses the hook."""
    model = WithHook(lambda _, x: x.register_hook(lambda g: 2 * g))
    with pytest.raises(CaptureError, match="register_hook"):
        capture(model, torch.randn(2, 4), loss=F.mse_loss)


def test_a_module_backward_hook_is_refused() -> None:
    """It names the module that has it."""
    model = WithHook()
    model.first.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match='module "first" has a backward hook'):
        capture(model, torch.randn(2, 4), loss=F.mse_loss)


def test_a_contrastive_loss_is_noticed_in_the_first_step() -> None:
    """It compares rows of the batch, so micro-batches change it."""

    def contrast(output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output @ output.T, torch.arange(output.shape[0]))

    graph = capture(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4), loss=contrast
    )
    plan = cases.make_plan(graph, (1,), 8, 2)
    with pytest.warns(UserWarning, match="no mean over rows"):
        on_ranks(graph, plan, lambda trainer: trainer.step(torch.randn(8, 4)).loss)


class ScaledByLongest(nn.Module):
    """Divides by the largest of some integers of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.first(x) / lengths.max())


def test_a_maximum_over_the_batch_of_integers_is_noticed() -> None:
    """Even if the example has the same maximum in both halves."""
    with pytest.warns(UserWarning, match="rows depend on each other"):
        capture(ScaledByLongest(), (torch.randn(4, 4), torch.tensor([3, 1, 3, 1])), loss=F.mse_loss)


def test_batches_of_different_sizes_are_refused_on_every_rank() -> None:
    """Ranks would otherwise wait for messages that never come."""
    graph = capture(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4), loss=F.mse_loss
    )
    plan = cases.make_plan(graph, (1, 1), 8, 2)

    def work(trainer: Trainer) -> str:
        rows = 8 + trainer.rank
        with pytest.raises(InputError, match="batches of different sizes"):
            trainer.step(torch.randn(rows, 4), torch.randn(rows, 4))
        return "refused"

    assert on_ranks(graph, plan, work) == ["refused", "refused"]


@pytest.mark.parametrize(
    ("changes", "call", "words"),
    [
        (lambda rank: {"shares": ((1.0, 1.0 + rank),)}, None, "the plan is one of 1 stages"),
        (lambda rank: {"precision": ["bf16", "float32"][rank]}, None, "precision is "),
        (lambda rank: {"clip_norm": 1.0 + rank}, None, r"clipping is \("),
        (lambda rank: {}, lambda t, b: t.step(*b, update=t.rank == 0), "the call is step with upd"),
        (lambda rank: {}, lambda t, b: (t.step if t.rank else t.evaluate)(*b), "the call is "),
    ],
    ids=["plan", "precision", "clipping", "update", "call"],
)
def test_ranks_that_were_told_different_things_are_refused(
    changes: Callable[[int], dict[str, Any]], call: Any, words: str
) -> None:
    """On each of them, instead of adding up gradients of other rows or waiting for ever."""
    graph, batch = cases.build("mlp"), cases.EXAMPLES["mlp"].batch(8, 0)

    def work(transport: ThreadTransport) -> None:
        told = changes(transport.rank)
        plan = cases.make_plan(graph, (2,), 8, 2, shares=told.pop("shares", ()))
        trainer = Trainer(OwnCopy(graph), plan, sgd, transport=transport, **told)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"told different things: {words}"):
            (call or (lambda t, b: t.step(*b)))(trainer, batch)

    run_threads(2, work)
