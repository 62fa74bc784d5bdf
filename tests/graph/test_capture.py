"""What a capture takes and keeps: inputs and outputs of any structure, modes, buffers, names."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dapple.errors import CaptureError
from dapple.graph import LayerGraph, capture
from tests.graph import checks, models


class Options(nn.Module):
    """Takes keywords of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        extra: dict[str, Tensor] | None = None,
        mask: Tensor | None = None,
        scale: int = 1,
        square: bool = False,
    ) -> Tensor:
        x = self.first(x) * scale
        if extra is not None:
            x = x - extra["shift"] * extra["gain"]
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        x = self.last(x)
        return x * x if square else x


def run_whole(graph: LayerGraph, inputs: Any, training: bool = True) -> Any:
    """The captured model's output, all layers as one stage."""
    named = graph.flatten_inputs(inputs)
    stage = graph.stage(0, graph.num_layers, training)
    _, results = stage(graph.batch_size(named), named, {})
    return graph.unflatten_outputs(results, training)


OPTIONS: list[Any] = [
    lambda rows: torch.randn(rows, 4),
    lambda rows: (torch.randn(rows, 4), None, torch.rand(rows, 4) > 0.5),
    lambda rows: (torch.randn(rows, 4), {"shift": torch.randn(rows, 4), "gain": torch.ones(4)}),
    lambda rows: {"x": torch.randn(rows, 4), "scale": 3, "square": True, "mask": None},
    lambda rows: {"mask": torch.rand(rows, 4) > 0.5, "x": torch.randn(rows, 4)},
]


@pytest.mark.parametrize("make", OPTIONS)
def test_inputs_of_any_structure(make: Any) -> None:
    """Tensors, tuples, keywords, dicts in arguments, None, ints and bools are inputs."""
    model = Options()
    graph = capture(model, make(3), loss=F.mse_loss)
    inputs = make(5)
    assert torch.equal(run_whole(graph, inputs), checks.call(model, inputs))


def test_keywords_come_in_any_order() -> None:
    """The order of keywords at a step need not be that of the capture."""
    model = Options()
    x, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    graph = capture(model, {"x": x, "mask": mask}, loss=F.mse_loss)
    assert torch.equal(run_whole(graph, {"mask": mask, "x": x}), model(x, mask=mask))


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


RESULTS: dict[str, Any] = {
    "scalar": lambda loss, logits: loss,
    "tuple": lambda loss, logits: (loss, logits),
    "dict": lambda loss, logits: {"logits": logits, "loss": loss, "kind": "test", "none": None},
    "named tuple": lambda loss, logits: Pair(loss, logits),
}


@pytest.mark.parametrize("kind", list(RESULTS))
def test_a_model_may_return_its_loss_in_any_structure(kind: str) -> None:
    """Alone, first in a tuple, or as "loss" of a dict or named tuple."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            logits = self.linear(x)
            return RESULTS[kind](F.cross_entropy(logits, labels), logits)

    model = WithLoss()
    graph = capture(model, (torch.randn(3, 4), torch.tensor([0, 1, 2])))
    inputs = (torch.randn(2, 4), torch.tensor([2, 0]))
    output = run_whole(graph, inputs)
    logits = model.linear(inputs[0])
    assert torch.equal(graph.loss_of(output, None), F.cross_entropy(logits, inputs[1]))


def test_capture_leaves_the_model_as_it_was() -> None:
    """Pitfall 13: no buffer update by the capture; weights and modes are the same."""
    model = models.Normed()
    model.layers[1][1].eval()
    state = {n: v.clone() for n, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    capture(model, torch.randn(3, 6), loss=F.mse_loss)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_capture_draws_no_random_numbers() -> None:
    """Initial weights of a model made afterwards don't depend on a capture before."""
    model, example = models.Dropped(), torch.randn(3, 6)
    before = torch.get_rng_state()
    capture(model, example, loss=F.mse_loss)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_in_evaluation_mode_stays_so_in_training() -> None:
    """A BatchNorm that the user froze with eval() does not update its statistics."""
    model = models.Normed()
    model.layers[1][1].eval()
    graph = capture(model, torch.randn(3, 6), loss=F.mse_loss)
    run_whole(graph, torch.randn(4, 6))
    counts = [int(block[1].num_batches_tracked) for block in model.layers]
    assert counts == [1, 0, 1]


def test_running_statistics_are_those_of_the_model() -> None:
    """Pitfall 13: one update per call, the same numbers, in the model's own buffers."""
    torch.manual_seed(0)
    model, plain = models.Normed(), models.Normed()
    plain.load_state_dict(model.state_dict())
    graph = capture(model, torch.randn(3, 6), loss=F.mse_loss)
    for rows in (4, 2, 5):
        x = torch.randn(rows, 6)
        plain(x)
        run_whole(graph, x)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    plain.eval()
    x = torch.randn(4, 6)
    assert torch.equal(run_whole(graph, x, training=False), plain(x))


def test_dropout_is_off_in_evaluation_and_random_in_training() -> None:
    """The two modes are two captures."""
    model = models.Dropped()
    graph = capture(model, torch.randn(3, 6), loss=F.mse_loss)
    x = torch.randn(4, 6)
    assert not torch.equal(run_whole(graph, x), run_whole(graph, x))
    assert torch.equal(run_whole(graph, x, training=False), model.eval()(x))
    assert graph.stage(0, 1).is_random
    assert not graph.stage(0, 1, training=False).is_random


def test_dropout_inside_of_autocast_is_known_to_be_random() -> None:
    """A region that export keeps as one node does not hide what is in it."""

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.norm(F.dropout(x, 0.5, self.training))

    graph = capture(Region(), torch.randn(3, 4), loss=F.mse_loss)
    assert graph.stage(0, graph.num_layers).is_random
    assert graph.uses_batch_statistics(0, graph.num_layers)


def test_names_are_the_models_own() -> None:
    """Stages have the model's names for parameters and buffers, tied ones under the first name."""
    case = models.CASES["gpt"]
    graph = capture(case.model(), case.batch(3)[0], loss=case.loss)
    first = dict(graph.stage(0, 2).module.named_parameters())
    assert set(first) == {"embed.weight", "positions.weight"}
    last = dict(graph.stage(5, 6).module.named_parameters())
    assert set(last) == {"embed.weight"}
    assert graph.tied == (((0, "embed.weight"), (5, "embed.weight")),)
    assert graph.original_names()["embed.weight"] == ["embed.weight", "head.weight"]


def test_all_names_of_a_module_that_is_used_twice() -> None:
    """A module under two names is one set of tied parameters, buffers included."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.middle = nn.BatchNorm1d(4), nn.Linear(4, 4)
            self.two = self.one

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.middle(self.one(x)))

    graph = capture(Twice(), torch.randn(3, 4), loss=F.mse_loss)
    names = graph.original_names()
    assert names["one.weight"] == ["one.weight", "two.weight"]
    assert names["one.running_mean"] == ["one.running_mean", "two.running_mean"]


def test_fingerprints_know_the_architecture_and_not_the_weights() -> None:
    """The same for other weights, another one for another width or depth."""
    example = torch.randn(3, 6)

    def fingerprint(model: nn.Module) -> str:
        return capture(model, example, loss=F.mse_loss, evaluation=False, name="m").fingerprint

    same = [fingerprint(models.CASES["two names"].make().float()) for _ in range(2)]
    assert same[0] == same[1]
    others = [models.FrozenMiddle(), models.CalledTwice(), models.NoParametersFirst()]
    assert len({same[0], *(fingerprint(m) for m in others)}) == 4


class SoftmaxOverTheBatch(nn.Module):
    """Each row's value depends on all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Softmax(dim=0), nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_rows_that_depend_on_each_other_are_noticed():
    """A softmax over the batch does not show in shapes, but in numbers."""
    with pytest.warns(UserWarning, match="rows depend on each other"):
        graph = capture(SoftmaxOverTheBatch(), torch.randn(4, 6), loss=F.mse_loss)
    assert any("rows depend on each other" in note for note in graph.notes)


def test_independent_rows_raise_no_alarm_and_leave_no_trace():
    """Dropout, batch norm and masks are not taken for mixing, and nothing is written or drawn."""
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)]
    model = nn.Sequential(*layers)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    state = torch.get_rng_state()
    graph = capture(model, torch.randn(4, 6, generator=torch.Generator()), loss=F.mse_loss)
    assert not graph.notes
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


class WithTable(nn.Module):
    """Reads a table that happens to have as many rows as the example batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ table


def test_an_input_can_be_named_as_no_batch():
    """A 4 x 4 table at an example batch of 4 is not cut into rows."""
    inputs = (torch.randn(4, 4), torch.eye(4))
    graph = capture(WithTable(), inputs, loss=F.mse_loss, shared=[1])
    assert [spec.batched for spec in graph.inputs] == [True, False]
    rows = graph.rows_of_inputs((torch.randn(7, 4), torch.eye(4)), slice(2, 5))
    assert [tuple(t.shape) for t in rows] == [(3, 4), (4, 4)]


def test_a_capture_serves_one_trainer():
    """Its other stages' parameters are freed, so a second one is refused by name."""
    graph = capture(nn.Linear(3, 3), torch.randn(4, 3), loss=F.mse_loss)
    graph.release(set())
    with pytest.raises(CaptureError, match="has a trainer already"):
        graph.release(set())
