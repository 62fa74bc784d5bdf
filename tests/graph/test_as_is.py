"""Layers that export can't look into are taken as they are, and train like one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from dapple.errors import CaptureError, InputError, PlanError
from dapple.graph import LayerGraph, capture
from dapple.profiler.measured import measure_profile
from dapple.runtime.trainer import Trainer
from dapple.runtime.wiring import check_model
from dapple.workload import Workload
from tests.graph import checks
from tests.runtime.cases import TOLERANCE, global_error, make_plan
from tests.runtime.threads import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*layers are taken as they are")


class Branching(nn.Module):
    """Branches on data, by rows that stay independent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        rows = [row * 2 if row.sum() > 0 else row - 1 for row in y]
        return torch.tanh(torch.stack(rows))


class Reversed(torch.autograd.Function):
    """A backward of its own."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -3 * gradient


class Own(nn.Module):
    """Returns a tuple: what a function with its own backward gives, a bool, None and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return Reversed.apply(self.linear(x)), {"mask": x > 0, "scale": 3.0}, None


class Reader(nn.Module):
    """Takes that tuple, and runs a part under reentrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[Any, ...]) -> Tensor:
        x, kept, nothing = given
        assert nothing is None
        x = checkpoint(self.linear, x, use_reentrant=True)
        return torch.where(kept["mask"], x, kept["scale"] * x)


class TimeFirst(nn.Module):
    """[B, 6] to [2, B, 6] and back."""

    def __init__(self, back: bool = False) -> None:
        super().__init__()
        self.back, self.linear = back, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x.sum(0) if self.back else torch.stack([x, -x])


def layers() -> list[nn.Module]:
    first = nn.Linear(6, 6)
    last = nn.Linear(6, 6)
    last.weight = first.weight
    middle = [Own(), Reader(), nn.ReLU(inplace=True), TimeFirst(), TimeFirst(back=True)]
    return [first, Branching(), *middle, nn.Sequential(nn.Linear(6, 6), nn.Tanh()), last]


def built() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*layers()).double()


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, rows, 6, generator=random, dtype=torch.float64)
    return x, y


@functools.cache
def captured() -> LayerGraph:
    return capture(built(), batch(3, 0)[0], loss=F.mse_loss, name="as is")


def test_each_child_is_a_layer() -> None:
    """Those without parameters go with the layer before; a note says why they are taken so."""
    graph = captured()
    assert graph.layer_names == ("0", "1", "2", "3", "5", "6", "7", "8")
    assert graph.tied == (((0, "0.weight"), (7, "0.weight")),)
    (note,) = graph.notes
    assert note.startswith("layers are taken as they are, since Sequential can't be captured")
    assert {t.row_dim for t in graph.tensors()} == {0, 1}
    assert {t.dtype for t in graph.tensors()} == {torch.float64, torch.bool}


def test_every_cut_gives_the_same_loss_and_gradients() -> None:
    """One cut at each boundary and all at once, at other batch sizes than the example's."""
    model = built()
    graph = capture(model, batch(3, 0)[0], loss=F.mse_loss, evaluation=False)
    for rows in (4, 1):
        x, y = batch(rows, 1)
        loss, wanted = checks.whole(model, F.mse_loss, x, y)
        single = [[cut] for cut in range(1, graph.num_layers)]
        for cuts in [[], *single, list(range(1, graph.num_layers))]:
            model.zero_grad()
            assert torch.equal(checks.in_stages(graph, cuts, x, y), loss)
            found = checks.gradients(model)
            assert all(torch.allclose(found[n], g, atol=1e-14) for n, g in wanted.items())


@pytest.mark.parametrize("recompute", [False, True])
def test_unequal_replicas_equal_one_process(recompute: bool) -> None:
    """Three stages, a tied weight over the first and the last, evaluation too."""
    graph = captured()
    plan = make_plan(graph, (2, 1, 3), 7, 3)
    if recompute:
        again = tuple(s.model_copy(update={"recompute": i != 1}) for i, s in enumerate(plan.stages))
        plan = plan.model_copy(update={"stages": again})
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(7, step)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    loss = F.mse_loss(model(batch(5, 9)[0]), batch(5, 9)[1]).item()

    def work(trainer: Trainer) -> tuple[dict[str, Tensor], float]:
        for step in range(2):
            trainer.step(*batch(7, step))
        return trainer.state_dict(), float(trainer.evaluate(*batch(5, 9)))

    results = on_ranks(graph, plan, work)
    assert global_error([state for state, _ in results], dict(model.state_dict())) < TOLERANCE
    assert [found for _, found in results] == pytest.approx([loss] * 6, rel=TOLERANCE)


def test_a_list_of_layers_is_a_model() -> None:
    """Export takes it where it can, and the profiler measures it either way."""
    plain = capture(
        [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)], torch.randn(3, 6), loss=F.mse_loss
    )
    assert (plain.layer_names, plain.notes) == (("0", "2"), ())
    graph = capture(layers(), torch.randn(3, 6), loss=F.mse_loss, evaluation=False)
    workload = Workload(
        "own", graph._model, lambda r: torch.randn(r, 6), lambda r: torch.randn(r, 6), F.mse_loss
    )
    profile = measure_profile(graph, workload, batch_sizes=(1, 3), rounds=1)
    assert profile.num_layers == 8
    assert all(layer.forward_seconds[0] > 0 for layer in profile.layers)


class Normed(nn.Module):
    """Batch norm and dropout beside a branch on data."""

    def __init__(self, statistics: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, track_running_stats=statistics)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.dropout(x) if x.sum() > 1e9 or x.numel() else x


def test_capture_leaves_the_layers_and_the_generator_as_they_were() -> None:
    """Running statistics, modes and random numbers are untouched, and known to be written."""
    model = nn.Sequential(nn.Linear(6, 6), Branching(), Normed(), nn.Linear(6, 6))
    before = {n: v.clone() for n, v in model.state_dict().items()}
    state = torch.get_rng_state()
    graph = capture(model, torch.randn(3, 6, generator=torch.Generator()), loss=F.mse_loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert graph.written_buffers(0, graph.num_layers) == (
        "2.norm.running_mean",
        "2.norm.running_var",
        "2.norm.num_batches_tracked",
    )
    assert graph.stage(0, graph.num_layers).is_random
    assert not graph.stage(0, graph.num_layers, training=False).is_random
    assert not any("rows depend" in note for note in graph.notes)


@pytest.mark.parametrize("statistics", [True, False])
def test_what_needs_a_look_inside_is_refused(statistics: bool) -> None:
    """Batch norm over replicas, and a second forward that would write buffers twice."""
    model = nn.Sequential(nn.Linear(6, 6), Branching(), Normed(statistics), nn.Linear(6, 6))
    graph = capture(model, torch.randn(3, 6), loss=F.mse_loss)
    with pytest.raises(PlanError, match=r'2 replicas and holds batch norm "2\.norm" in a layer'):
        check_model(graph, make_plan(graph, (2,), 8, 2))
    plan = make_plan(graph, (1,), 8, 2)
    check_model(graph, plan)
    again = (plan.stages[0].model_copy(update={"recompute": True}),)
    if statistics:
        with pytest.raises(PlanError, match=r"recomputes a layer .* would happen twice"):
            check_model(graph, plan.model_copy(update={"stages": again}))


class Says(nn.Module):
    """Returns something else next to a tensor."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), self.what(x)


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
        return pair[0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda x: len(x), "layer 1 returns int 3, which is no tensor and no constant"),
        (lambda x: torch.ones(len(x) // 2), r"layer 1 returns \[1\] for 3 rows and \[2\] for one"),
        (lambda x: x[9], "layer 1 fails on the example batch: IndexError"),
    ],
)
def test_what_a_layer_may_not_hand_on(what: Any, words: str) -> None:
    """Numbers and sizes that depend on the batch in other ways than by its rows."""
    with pytest.raises(CaptureError, match=words):
        capture([Branching(), Says(what), First()], torch.randn(3, 6), loss=F.mse_loss)


def test_a_constant_that_changes_later_is_an_error() -> None:
    """A number that the capture took for fixed is never replaced without a word."""
    layers = [Says(lambda x: bool(x.abs().max() > 100)), First(), Branching()]
    graph = capture(layers, torch.randn(3, 6), loss=F.mse_loss, evaluation=False)
    checks.in_stages(graph, [], torch.randn(4, 6), torch.randn(4, 6))
    with pytest.raises(InputError, match="layer 0 returned something else than at capture"):
        checks.in_stages(graph, [], 1000 * torch.ones(4, 6), torch.randn(4, 6))


def test_a_model_of_another_kind_is_told_the_way_out() -> None:
    """The error says what broke the export, and that a list of layers is taken as it is."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branching()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(CaptureError, match=r"Wrapped can't be .*; or hand over a list of layers"):
        capture(Wrapped(), torch.randn(3, 6), loss=F.mse_loss)
