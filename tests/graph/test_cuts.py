"""A model cut anywhere computes what the whole model computes, to the last bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from dapple.graph import LayerGraph, capture
from tests.graph import checks
from tests.graph.models import CASES

# Statistics over a single row are no statistics.
ROWS = {"normed": (4, 3)}
# A skip's gradient is a sum of three, which stages add up in another order.
LARGEST_ERROR = {"skip": 1e-15}


@functools.cache
def captured(name: str) -> tuple[nn.Module, LayerGraph]:
    case = CASES[name]
    model = case.model()
    return model, capture(model, case.batch(3)[0], loss=case.loss, evaluation=False)


@pytest.mark.parametrize("name", list(CASES))
def test_every_cut_gives_the_same_loss_and_gradients(name: str) -> None:
    """One cut at each boundary, and all cuts at once, at other batch sizes than the example's."""
    case = CASES[name]
    model, graph = captured(name)
    single = [[cut] for cut in range(1, graph.num_layers)]
    for rows in ROWS.get(name, (4, 1)):
        inputs, targets = case.batch(rows, seed=1)
        loss, wanted = checks.whole(model, case.loss, inputs, targets)
        for cuts in [[], *single, list(range(1, graph.num_layers))]:
            model.zero_grad()
            assert torch.equal(checks.in_stages(graph, cuts, inputs, targets), loss)
            error = LARGEST_ERROR.get(name, 0.0)
            assert_equal_gradients(checks.gradients(model), wanted, error)


def assert_equal_gradients(
    found: dict[str, Any], wanted: dict[str, Any], error: float = 0.0
) -> None:
    """Bitwise by default; a parameter that the loss ignores may have zeros for None."""
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None or not found[name].any(), name
        else:
            assert found[name] is not None, name
            assert (found[name] - gradient).abs().max().item() <= error, name


@pytest.mark.parametrize("name", list(CASES))
def test_models_have_the_layers_that_a_reader_sees(name: str) -> None:
    """No boundary of these models is illegal: as many layers as blocks, and no note."""
    _, graph = captured(name)
    assert (graph.num_layers, graph.notes) == (CASES[name].layers, ())


@pytest.mark.parametrize("name", list(CASES))
def test_every_parameter_belongs_to_a_layer_once(name: str) -> None:
    """Pitfall 23: no layer is dropped by a split, and only tied parameters are held twice."""
    model, graph = captured(name)
    held = [n for layer in range(graph.num_layers) for n in graph.parameters_of(layer)]
    assert sorted({*held, *graph.unused_parameters}) == sorted(
        n for n, _ in model.named_parameters()
    )
    tied = {group[0][1]: len(group) for group in graph.tied}
    assert {n: held.count(n) for n in set(held)} == {n: tied.get(n, 1) for n in set(held)}
    for start in range(graph.num_layers):
        for stop in range(start + 1, graph.num_layers + 1):
            names = {n for layer in range(start, stop) for n in graph.parameters_of(layer)}
            module = graph.stage(start, stop).module
            assert {n for n, _ in module.named_parameters()} == names
            for parameter_name, parameter in module.named_parameters():
                assert parameter is model.get_parameter(parameter_name)


def test_masks_and_positions_are_computed_again_and_not_sent() -> None:
    """What depends on integer inputs and buffers only is no boundary tensor."""
    _, graph = captured("masked")
    assert [t.dtype for t in graph.tensors()] == [torch.float64] * 3
    last = graph.stage(3, 4)
    assert set(last.reads_inputs) == {"lengths"}
    assert len(last.reads) == 1


def test_values_skip_layers_from_their_producer_to_each_consumer() -> None:
    """Pitfall 11: a skip is one tensor with a distant consumer, not passed on hand to hand."""
    _, graph = captured("skip")
    far = [t for t in graph.tensors() if t.consumers[-1] > t.producer + 1]
    assert [(t.producer, t.needs_grad) for t in far] == [(1, True), (1, False)]
    middle = graph.stage(2, 3)
    assert not {t.name for t in middle.makes} & {t.name for t in far}


def test_ints_and_bools_cross_without_gradient() -> None:
    """Pitfall 16: an int, a bool and a detached float cross cuts, and nothing comes back."""
    _, graph = captured("int and bool")
    silent = {t.dtype for t in graph.tensors() if not t.needs_grad}
    assert silent == {torch.int64, torch.bool, torch.float64}


def test_rows_are_found_in_any_dimension_or_in_none() -> None:
    """Rows lie in dimension 1 of a [T, B, D] tensor, and nowhere in one made of parameters."""
    assert {t.row_dim for t in captured("rows in dim one")[1].tensors()} == {1}
    assert [t.shape_for(9) for t in captured("rows in dim one")[1].tensors()] == [(3, 9, 6)] * 2
    assert {t.row_dim for t in captured("no rows")[1].tensors()} == {0, None}


def test_frozen_layers_ask_for_no_gradients_before_them() -> None:
    """In front of the first trainable layer no gradient travels; behind it, through frozen ones."""
    assert [t.needs_grad for t in captured("frozen first")[1].tensors()] == [False, True]
    assert [t.needs_grad for t in captured("frozen middle")[1].tensors()] == [True, True]


def test_a_tensor_that_rows_do_not_divide_is_not_cut() -> None:
    """Batch and time flattened into one dimension: the layers are joined, and a note says why."""

    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x).flatten(0, 1)  # [B * 3, 2]
            x = self.layers[2](torch.tanh(self.layers[1](x)))
            return self.layers[3](x.unflatten(0, (-1, 3)))

    model = Flattened()
    graph = capture(model, torch.randn(4, 3, 2), loss=nn.functional.mse_loss, evaluation=False)
    assert graph.layer_names[0] == "layers.0"
    assert graph.num_layers == 2
    assert any("layers.1 and layers.2" in note for note in graph.notes)
    inputs, targets = torch.randn(5, 3, 2), torch.randn(5, 3, 2)
    loss, _ = checks.whole(model, nn.functional.mse_loss, inputs, targets)
    assert torch.equal(checks.in_stages(graph, [1], inputs, targets), loss)


def test_memory_that_a_later_layer_writes_into_is_not_cut() -> None:
    """A write into a view of an earlier layer's tensor: the layers are joined, and a note says why."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.tanh(self.layers[0](x)) * 1.0
            x = self.layers[1](x)
            total[:, :2] += x[:, :2]
            x = torch.tanh(self.layers[2](x)) + total
            return self.layers[3](x)

    model = Written().double()
    graph = capture(
        model, torch.randn(4, 4).double(), loss=nn.functional.mse_loss, evaluation=False
    )
    assert any("written in place" in note for note in graph.notes)
    inputs, targets = torch.randn(5, 4).double(), torch.randn(5, 4).double()
    loss, wanted = checks.whole(model, nn.functional.mse_loss, inputs, targets)
    for cut in range(1, graph.num_layers):
        model.zero_grad()
        assert torch.equal(checks.in_stages(graph, [cut], inputs, targets), loss)
        assert_equal_gradients(checks.gradients(model), wanted)
