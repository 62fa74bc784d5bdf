"""Which uses of tensors every loss gives a gradient: found out on the autograd graph of the whole model.

A loss may leave out some of a model's outputs, and an operator may have no gradient. What only
they depend on has no gradient then, which is not the same as zeros: an optimizer would let weight
decay and momentum move a parameter with zeros. Stages tell each other what has none, but only of
uses that are not certain. A tensor that several layers read has a use by each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dapple.graph.program import Program
from dapple.graph.valueless import InputKind, Valueless

Use = tuple[str, int]
_Edge = tuple[Any, int]


def certain_gradients(
    program: Program,
    inputs: Iterable[InputKind],
    starts: Callable[[Sequence[Any]], Any],
) -> frozenset[Use]:
    """(tensor between layers, layer that reads it), of all that get a gradient whatever the loss is.

    The whole program runs without values. Where it can't, nothing is certain.

    Args:
        program: the exported model, in training mode.
        inputs: what it is given, in order.
        starts: from the model's flat outputs to those of which a loss depends on one at least.
    """
    if any(program.opaque_layers(layer, layer + 1) for layer in range(program.num_layers)):
        return frozenset()  # what runs inside need not be able to do without values
    runner = _Edges(program)
    try:
        with torch.enable_grad():
            outputs = runner.run_on(inputs)
    except Exception:
        # An operator that needs values: being in doubt costs messages, nothing else.
        return frozenset()
    flat = pytree.tree_leaves(starts(outputs))
    trained = [v for v in flat if isinstance(v, torch.Tensor) and v.requires_grad]
    if not trained:
        return frozenset()
    reached = set.intersection(*(_reached(value) for value in trained))
    return frozenset(use for use, edge in runner.edges.items() if edge in reached)


class _Edges(Valueless):
    """Notes where gradients of some tensors would come from.

    Each layer is handed a view of its own of what it reads from others.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._layer_of = program.layer_of
        self._last = program.num_layers - 1
        self._views: dict[Use, torch.Tensor] = {}
        self.edges: dict[Use, _Edge] = {}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """What a node is called with."""
        layer = self._last if n.op == "output" else self._layer_of.get(n)
        if layer is None:
            return super().fetch_args_kwargs_from_env(n)

        def handed(node: fx.Node) -> Any:
            value = self.env[node]
            if self._layer_of.get(node, layer) == layer or not isinstance(value, torch.Tensor):
                return value
            return self._view((node.name, layer), value)

        return fx.map_arg(n.args, handed), fx.map_arg(n.kwargs, handed)

    def _view(self, use: Use, value: torch.Tensor) -> torch.Tensor:
        if not value.requires_grad:
            return value
        if use not in self._views:
            view = self._views[use] = value.view_as(value)
            self.edges[use] = (view.grad_fn, view.output_nr)
        return self._views[use]


def _reached(value: torch.Tensor) -> set[_Edge]:
    """All edges of the autograd graph behind a tensor, its own included."""
    found: set[_Edge] = set()
    waiting: list[_Edge] = [(value.grad_fn, value.output_nr)]
    while waiting:
        edge = waiting.pop()
        if edge[0] is not None and edge not in found:
            found.add(edge)
            waiting += edge[0].next_functions
    return found
