"""Ints, bools, floats, None, dicts and keywords between user, model and stages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dapple.errors import CaptureError, InputError
from dapple.graph import LayerGraph, capture
from dapple.runtime.trainer import Trainer
from tests.runtime.cases import TOLERANCE, global_error, make_plan
from tests.runtime.threads import on_ranks

ROWS = 7


class Block(nn.Module):
    """Takes and returns a dict: floats with and without gradient, an int, a bool, None, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, state: dict[str, Any], *, scale: float, skip: bool) -> dict[str, Any]:
        x = torch.tanh(self.linear(state["x"])) * scale
        x = torch.where(state["up"], x, 0.5 * x) + (0 if skip else state["kept"])
        return {
            "x": x,
            "up": x.detach() > 0,
            "best": x.argmax(dim=1),
            "kept": state["kept"].detach() + state["count"],
            "count": state["count"] + 1,
            "nothing": None,
        }


class Everything(nn.Module):
    """Blocks that hand a dict on, with arguments of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.table = nn.Embedding(6, 6)

    def forward(
        self,
        x: Tensor,
        extra: dict[str, Any],
        *,
        mask: Tensor | None = None,
        temperature: Tensor | None = None,
        scale: float = 1.0,
        times: int = 1,
        skip: bool = False,
        mode: str = "mean",
    ) -> dict[str, Any]:
        x = x - extra["deep"][0] if extra["shift"] is None else x + extra["shift"]
        state: dict[str, Any] = {"x": x, "up": x > 0, "kept": x, "count": times}
        for block in self.blocks:
            state = block(state, scale=scale, skip=skip)
        y = state["x"] + self.table(state["best"])
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        if temperature is not None:
            y = y / temperature
        pooled = y.mean(1) if mode == "mean" else y.sum(1)
        return {"y": [y, None], "pooled": pooled, "mode": mode, "count": state["count"]}


def inputs_of(rows: int, step: int, **changes: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(60 + step)
    x, deep = torch.randn(2, rows, 6, generator=random, dtype=torch.float64)
    return {
        "x": x,
        "extra": {"shift": None, "deep": (deep, 3)},
        "mask": torch.rand(rows, 6, generator=random) > 0.7,
        "temperature": torch.tensor(1.5, dtype=torch.float64),
        "scale": 0.75,
        "times": 2,
        "skip": False,
        "mode": "sum",
        **changes,
    }


def loss(output: dict[str, Any], targets: dict[str, Any]) -> Tensor:
    assert output["y"][1] is None
    assert output["count"] == 6
    values = F.mse_loss(output["pooled"], targets["pooled"], reduction="none")
    return (values * targets["weights"][0]).mean() + output["y"][0].square().mean()


def targets_of(rows: int) -> dict[str, Any]:
    pooled = torch.linspace(-1, 1, rows, dtype=torch.float64)
    return {"pooled": pooled, "weights": [pooled.exp(), None], "name": "pooled"}


def build() -> nn.Module:
    torch.manual_seed(1)
    return Everything().double()


@functools.cache
def captured() -> LayerGraph:
    return capture(build(), inputs_of(3, 0), loss=loss, name="everything")


@pytest.mark.parametrize("replicas", [(2, 1, 3), (1, 1, 1, 1)], ids=str)
def test_values_of_all_kinds_train_as_in_one_process(replicas: tuple[int, ...]) -> None:
    """Keywords with a dict, None, numbers, text and a scalar tensor; targets in a dict."""
    model = build()
    inputs, targets = inputs_of(ROWS, 1), targets_of(ROWS)
    wanted = loss(model(**inputs), targets)
    wanted.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    evaluated = loss(model.eval()(**inputs), targets).item()

    def work(trainer: Trainer) -> tuple[Any, float, float]:
        found = trainer.step(inputs, targets).loss
        return trainer.state_dict(), found, float(trainer.evaluate(inputs, targets))

    results = on_ranks(captured(), make_plan(captured(), replicas, ROWS, 3), work)
    assert global_error([state for state, _, _ in results], dict(model.state_dict())) < TOLERANCE
    for _, found, value in results:
        assert (found, value) == pytest.approx((wanted.item(), evaluated), rel=TOLERANCE)


def test_ints_bools_and_floats_without_gradient_cross() -> None:
    """What goes from block to block is sent by its own type, and None and numbers are not sent."""
    sent = [t for t in captured().tensors() if t.producer == 2]
    assert {(t.dtype, t.needs_grad) for t in sent} == {
        (torch.float64, True),
        (torch.float64, False),
        (torch.bool, False),
    }
    assert {t.dtype for t in captured().tensors() if not t.needs_grad} >= {torch.int64, torch.bool}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.5}, "scale was captured as 0.75 and is fixed; got 0.5"),
        ({"times": True}, "times was captured as 2 and is fixed; got True"),
        ({"mode": "mean"}, "mode was captured as 'sum' and is fixed; got 'mean'"),
        ({"mask": None}, "mask must be a tensor of torch.bool; got NoneType"),
        ({"scale": torch.tensor(0.75)}, "scale was captured as 0.75 and is fixed; got tensor"),
        ({"temperature": 1.5}, "temperature must be a tensor of torch.float64; got float"),
        ({"mask": [1, 2]}, r"captured with .*; pass the same arguments"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(next(iter(value))),
)
def test_another_value_than_at_capture_is_refused(change: dict[str, Any], message: str) -> None:
    """Numbers and text are part of the graph, so another one would be ignored without a word."""
    with pytest.raises(InputError, match=message):
        captured().flatten_inputs(inputs_of(ROWS, 0, **change))


class Opaque:
    """Nothing that pytree knows."""


@pytest.mark.parametrize(
    ("thing", "words"),
    [(Opaque(), "Opaque"), ([1, {1, 2}], "set")],
    ids=["object", "set in a list"],
)
def test_an_argument_that_is_no_value_is_refused(thing: Any, words: str) -> None:
    """The error names its type."""
    with pytest.raises(CaptureError, match=rf'argument "mode" holds a {words}; pass tensors'):
        capture(build(), inputs_of(3, 0, mode=thing), loss=loss)


def test_a_number_computed_from_data_does_not_cross() -> None:
    """Its layers are joined, and a note says so."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            x = self.layers[0](x)
            number = x.detach().max().item()
            x = self.layers[1](x)
            return self.layers[2](x * number)

    with pytest.warns(UserWarning, match="rows depend on each other"):
        graph = capture(
            Counts(),
            (torch.randn(3, 6), torch.tensor([1, 2, 3])),
            loss=F.mse_loss,
            evaluation=False,
        )
    assert graph.layer_names == ("layers.0", "layers.2")
    assert [note for note in graph.notes if "no cut between" in note and "is no tensor" in note]
