"""A numeric probe for models whose rows are not independent: the whole batch against two halves."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dapple.graph.fake import is_fake
from dapple.graph.nodes import is_call, is_random, is_tensor, region_of
from dapple.graph.program import Program

MIXING = "rows depend on each other"
_TOLERANCE = 1e-3
_ATTENTION = "scaled_dot_product_attention"


def rows_that_mix(program: Program, flat: Sequence[Any], batched: Sequence[bool]) -> list[str]:
    """Notes on tensors whose rows depend on other rows of the batch; empty if there are none.

    Shapes don't show it (a softmax over the batch), so the layers run on the example's rows
    together and in two halves. Batch norms are left out: their rule is known.

    Args:
        program: the training program.
        flat: the example inputs.
        batched: which of them have rows.
    """
    rows = next(v.shape[0] for v, b in zip(flat, batched, strict=True) if b)
    if _is_left_to_chance(program.graph) or any(is_fake(v) for v in flat):
        return []
    collapsed = _collapsed(program)
    if collapsed is not None:
        return [_note(collapsed)]
    half = rows // 2
    pieces = [slice(0, rows), slice(0, half), slice(half, rows)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, first, second = (
                _Probe(program).values(
                    [v[p] if b else v for v, b in zip(flat, batched, strict=True)]
                )
                for p in pieces
            )
    except Exception as error:
        return [f"whether rows mix could not be tried: {type(error).__name__}"]
    for name, (value, dim) in whole.items():
        halves = torch.cat([first[name][0], second[name][0]], dim=dim)
        if value.shape != halves.shape or not _same(value, halves):
            return [_note(name)]
    return []


def _is_left_to_chance(graph: fx.Graph) -> bool:
    """Some random numbers are no dropout, which could be left out."""
    for node in graph.nodes:
        body = region_of(node)
        if body is not None:
            if _is_left_to_chance(body.graph):
                return True
        elif is_random(node) and not _is_dropout(node):
            return True
    return False


def _note(name: str) -> str:
    return (
        f"{MIXING} (seen at {name}): pieces of a batch give other gradients than the whole batch; "
        "train with one micro-batch and one replica, or change the model"
    )


def _collapsed(program: Program) -> str | None:
    """A value that sums up a batch of integers, such as its largest length; None if there is none.

    It is computed anew from each piece's rows, and an example may hide that it differs.
    """
    for node in program.recomputed:
        if is_call(node) and is_tensor(node) and not _has_rows(node):
            name = str(node.target)
            if "new_" not in name and any(
                is_tensor(a) and _has_rows(a) for a in node.all_input_nodes
            ):
                return node.name
    return None


def _has_rows(node: fx.Node) -> bool:
    return any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)


def _is_dropout(node: fx.Node) -> bool:
    name = str(node.target)
    return "dropout" in name or _ATTENTION in name


def _same(value: torch.Tensor, other: torch.Tensor) -> bool:
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return bool((value == other).float().mean() > 1 - _TOLERANCE)
    known = torch.isfinite(value) & torch.isfinite(other)
    if not bool(known.any()):
        return True
    scale = value[known].abs().max()
    return bool((value - other)[known].abs().max() <= _TOLERANCE * scale + 1e-9)


class _Still(fx.Interpreter):
    """Runs a graph without chance, without batch statistics, and without writing anything."""

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; dropout passes on what it is given."""
        if is_random(n) and _is_dropout(n) and _ATTENTION not in str(n.target):
            return self.fetch_args_kwargs_from_env(n)[0][0]
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A copy of a buffer, so that what is written goes nowhere."""
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, fx.GraphModule):
            return _Region(value)
        plain = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        return value.clone() if plain else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Batch norms use their running statistics if they have any, attention drops nothing."""
        if _ATTENTION in str(target) and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        if "batch_norm" in str(target) and len(args) > 5 and args[5] is True:
            if args[3] is None:
                return args[0]
            args = (*args[:5], False, *args[6:])
        return super().call_function(target, args, kwargs)


class _Region(torch.nn.Module):
    """The body of a region, such as autocast, run in the same way."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self._body = body

    def forward(self, *values: Any) -> Any:
        """What the body computes."""
        return _Still(self._body).run(*values)


class _Probe(_Still):
    """Keeps a program's watched tensors."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module, garbage_collect_values=True)
        self._watched = {
            node: tensor.row_dim
            for node, tensor in program.boundary_tensors().items()
            if tensor.row_dim is not None
        }
        for output in program.outputs:
            if isinstance(output, fx.Node) and is_tensor(output):
                dim = program.row_dim(output)
                if dim is not None:
                    self._watched[output] = dim
        self._found: dict[str, tuple[torch.Tensor, int]] = {}

    def values(self, inputs: Sequence[Any]) -> dict[str, tuple[torch.Tensor, int]]:
        """The watched tensors and their row dimensions."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.run(*inputs, enable_io_processing=False)
        return self._found

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and keep its value if it is watched."""
        result = super().run_node(n)
        if n in self._watched:
            self._found[n.name] = (result, self._watched[n])
        return result
