"""Which tensors every loss gives a gradient: found out on the autograd graph of the whole model.

A loss may leave out some of a model's outputs, and an operator may have no gradient. What only
they depend on has no gradient then, which is not the same as zeros: an optimizer would let weight
decay and momentum move a parameter with zeros. Stages tell each other what has none, but only of
tensors that are not certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from dapple.graph.program import Program

_Edge = tuple[Any, int]


def certain_gradients(
    program: Program,
    inputs: Iterable[tuple[tuple[int, ...], torch.dtype] | Any],
    starts: Callable[[Sequence[Any]], Any],
) -> frozenset[str]:
    """Names of the tensors between layers that get a gradient whatever the loss is.

    The whole program runs on tensors that have shape and type but no values. Where it can't,
    nothing is certain.

    Args:
        program: the exported model, in training mode.
        inputs: (shape, type) of tensors, and constants as they are, in order.
        starts: from the model's flat outputs to those of which a loss depends on one at least.
    """
    tensors = {node.name for node in program.boundary_tensors()}
    if any(program.opaque_layers(layer, layer + 1) for layer in range(program.num_layers)):
        return frozenset()  # what runs inside need not be able to do without values
    runner = _Edges(program.module, tensors)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), torch.enable_grad():
        # On the devices of the capture, which the program's own constants may name.
        arguments = [
            torch.empty(value[0], dtype=value[1], device=node.meta["val"].device)
            if isinstance(value, tuple)
            else value
            for value, node in zip(inputs, program.placeholders, strict=True)
        ]
        try:
            outputs = runner.run(*arguments, enable_io_processing=False)
        except Exception:
            # An operator that needs values: being in doubt costs messages, nothing else.
            return frozenset()
    flat = pytree.tree_leaves(starts(outputs))
    trained = [v for v in flat if isinstance(v, torch.Tensor) and v.requires_grad]
    if not trained:
        return frozenset()
    reached = set.intersection(*(_reached(value) for value in trained))
    return frozenset(name for name, edge in runner.edges.items() if edge in reached)


class _Edges(fx.Interpreter):
    """Notes where gradients of some tensors would go."""

    def __init__(self, module: fx.GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self._names = names
        self.edges: dict[str, _Edge] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Compute a node."""
        value = super().run_node(n)
        if n.name in self._names and value.grad_fn is not None:
            self.edges[n.name] = (value.grad_fn, value.output_nr)
        return value

    def fetch_attr(self, target: str) -> Any:
        """A parameter or buffer without its values."""
        value = super().fetch_attr(target)
        if isinstance(value, torch.Tensor):
            return torch.empty_like(value).requires_grad_(value.requires_grad)
        return value


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
