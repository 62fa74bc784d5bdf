"""What can't be captured or fed is refused with the fact, the values and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from dapple.errors import CaptureError, InputError
from dapple.graph import LayerGraph, capture


class Affine(nn.Module):
    """Two layers; what happens between them is told by a function."""

    def __init__(self, between: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.first(x)
        if self.between is not None:
            x = self.between(self, x)
        return self.last(x if scale is None else x * scale)


def graph_of(inputs: Any) -> LayerGraph:
    return capture(Affine(), inputs, loss=F.mse_loss, evaluation=False)


def test_an_example_of_one_row() -> None:
    """Export takes a single row for a fixed size."""
    with pytest.raises(CaptureError, match="have 1 row; pass at least 2"):
        graph_of(torch.randn(1, 4))


def test_an_example_without_tensors() -> None:
    """Without a batch there is nothing to train on."""
    with pytest.raises(CaptureError, match="no tensor with a batch dimension; pass one"):
        graph_of((3,))


def branch_on_data(self: Affine, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def fixed_batch(self: Affine, x: Tensor) -> Tensor:
    return x.reshape(3, 4) * 2


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


def own_backward(self: Affine, x: Tensor) -> Tensor:
    return Reversed.apply(x)


def reentrant(self: Affine, x: Tensor) -> Tensor:
    return checkpoint(torch.tanh, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (
            branch_on_data,
            [
                "Affine can't be captured",
                "test_refusals.py:",
                "x = self.between(self, x)",
                "branches on tensor",
            ],
        ),
        (fixed_batch, ["fixes the batch size", "take sizes from the input's shape"]),
        (own_backward, ["Reversed, an autograd.Function", "write it with operators"]),
        (
            reentrant,
            ["use_reentrant=True) in the model's own forward", "call it with use_reentrant=False"],
        ),
    ],
)
def test_a_forward_that_export_can_not_keep(between: Any, words: list[str]) -> None:
    """A branch on data, a fixed batch size, and backwards that export would lose silently."""
    with pytest.raises(CaptureError) as refusal:
        capture(Affine(between), torch.randn(3, 4), loss=F.mse_loss)
    assert [word for word in words if word not in str(refusal.value)] == []


def test_a_failed_export_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Export's own output, a graph of many pages, does not bury the one line that helps."""
    with pytest.raises(CaptureError):
        capture(Affine(branch_on_data), torch.randn(3, 4), loss=F.mse_loss)
    assert "".join(capfd.readouterr()) == ""


def not_reentrant(self: Affine, x: Tensor) -> Tensor:
    return checkpoint(torch.tanh, x, use_reentrant=False)


def offloaded(self: Affine, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(x)


@pytest.mark.parametrize(
    ("between", "kind"), [(not_reentrant, "checkpoint"), (offloaded, "save_on_cpu")]
)
def test_memory_that_would_no_longer_be_saved(between: Any, kind: str) -> None:
    """The operators are taken, and the user is told in which modules the saving is gone."""
    model = nn.Sequential(Affine(between), Affine(between), Affine())
    words = rf'not saved by {kind} in module "0" and 1 more: .* plan recompute layers instead'
    with pytest.warns(UserWarning, match=words):
        graph = capture(model, torch.randn(3, 4), loss=F.mse_loss, evaluation=False)
    assert len(graph.notes) == 1
    enter = torch.autograd.graph.saved_tensors_hooks.__enter__
    assert enter.__module__ == "torch.autograd.graph"


def test_no_scalar_loss() -> None:
    """A model that returns logits needs a loss function."""
    with pytest.raises(CaptureError, match="without a scalar loss; pass a loss function"):
        capture(Affine(), torch.randn(3, 4))


def test_a_loss_function_that_gives_no_scalar() -> None:
    """A loss per row is no loss of the batch."""
    graph = capture(Affine(), torch.randn(3, 4), loss=lambda y, t: (y - t).square().sum(1))
    with pytest.raises(InputError, match=r"returned \[3\] instead of a scalar tensor; return the"):
        graph.loss_of(torch.randn(3, 4), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.randn(3, 5), r"x has shape \[3, 5\], .* for \[batch, 4\]; capture it"),
        (torch.randn(3, 4, 1), r"x has shape \[3, 4, 1\]"),
        (torch.randn(3, 4).double(), r"x must be a tensor of torch.float32; got torch.float64"),
        ([[1.0], 2], r"are \(\[1.0\], 2\), but Affine was captured with \(tensor\); pass the same"),
        ((torch.randn(3, 4), torch.randn(3, 4)), r"are \(tensor, tensor\), but"),
        ({"y": torch.randn(3, 4)}, r"are \(y=tensor\), but"),
        (torch.randn(0, 4), r"x has no rows; pass a batch of at least one"),
        ("text", r"x must be a tensor of torch.float32; got str"),
    ],
)
def test_inputs_unlike_those_of_the_capture(inputs: Any, message: str) -> None:
    """Pitfall 6: another shape, dtype or structure is named, never cut to fit."""
    graph = graph_of(torch.randn(3, 4))
    with pytest.raises(InputError, match=message):
        graph.flatten_inputs(inputs)


def test_inputs_with_different_numbers_of_rows() -> None:
    """All inputs of a batch have its rows."""
    graph = graph_of((torch.randn(3, 4), torch.randn(3, 4)))
    with pytest.raises(InputError, match=r"different batch sizes: \{'x': 3, 'scale': 2\}"):
        graph.flatten_inputs((torch.randn(3, 4), torch.randn(2, 4)))


def test_a_constant_that_was_captured_with_another_value() -> None:
    """Ints and bools are built into the graph."""

    class Repeat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, times: int) -> Tensor:
            for _ in range(times):
                x = self.linear(x)
            return x

    graph = capture(Repeat(), (torch.randn(3, 4), 2), loss=F.mse_loss, evaluation=False)
    with pytest.raises(InputError, match="times was captured as 2 and is fixed; got 3"):
        graph.flatten_inputs((torch.randn(3, 4), 3))


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (1, 1), (0, 3), (-1, 1), (2, 1)])
def test_a_range_that_is_no_stage(start: int, stop: int) -> None:
    """A stage has at least one layer, all of them the model's."""
    graph = graph_of(torch.randn(3, 4))
    with pytest.raises(CaptureError, match=f"layers {start}..{stop} are no stage .* 2 layers"):
        graph.stage(start, stop)


def test_evaluation_that_was_not_captured() -> None:
    """A capture for profiling has no evaluation mode, and says how to get one."""
    with pytest.raises(CaptureError, match="evaluation=True"):
        graph_of(torch.randn(3, 4)).stage(0, 1, training=False)


class ScaledError(nn.Module):
    """A loss that would have to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * F.mse_loss(output, target)


def test_a_loss_with_parameters() -> None:
    """No stage holds them, so they would silently stay as they are."""
    with pytest.raises(CaptureError, match="ScaledError has parameters of its own"):
        capture(Affine(), torch.randn(2, 4), loss=ScaledError())


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["parallel", "compiled"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_is_wrapped_already(wrap: Any, whole: bool) -> None:
    """Pitfall 19: what shares out rows or parameters in its own way is refused by name."""
    model = wrap(nn.Linear(4, 4)) if whole else nn.Sequential(nn.Linear(4, 4), wrap(nn.Tanh()))
    name = "the model" if whole else 'module "1"'
    words = f"{name} is a (DataParallel|OptimizedModule): .*hand over the plain model"
    with pytest.raises(CaptureError, match=words):
        capture(model, torch.randn(4, 4), loss=nn.functional.mse_loss)


def test_a_model_that_is_sharded_already(tmp_path: Path) -> None:
    """Pitfall 19: also one that torch has changed the class of."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fsdp.fully_shard(model[0], mesh=mesh)
        with pytest.raises(CaptureError, match='module "0" is a FSDPModule: fully_shard has'):
            capture(model, torch.randn(4, 4), loss=nn.functional.mse_loss)
    finally:
        torch.distributed.destroy_process_group()
