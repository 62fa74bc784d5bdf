"""Gradients of weights that wait: the W half of a split backward.

A layer's weight gradient needs the layer's input and the gradient of its output, and nobody waits
for it before the step's end. So the linear layers and convolutions of a stage are replaced by ones
whose backward returns the gradient of the input only, and keeps these two tensors:

    y = x w^T + b        I: dx = dy w        kept: x, dy        W: dw = dy^T x, db = sum dy

All else (norms, embeddings, a weight that is used twice) gets its gradient in the I half. The
autograd graph is freed there; until W only x and dy of these layers stay alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

_WeightGradients = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]
_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.conv1d.default: 1, _aten.conv2d.default: 2, _aten.conv3d.default: 3}


class DeferredGradients:
    """Weight gradients of a stage that are still to be computed, by micro-batch."""

    def __init__(self) -> None:
        self._open: list[_WeightGradients] = []
        self._closed: dict[int, list[_WeightGradients]] = {}

    def add(self, gradients: _WeightGradients) -> None:
        """Leave something for later; called during a backward."""
        self._open.append(gradients)

    def close(self, micro_batch: int) -> None:
        """The backward of a micro-batch has ended: what was left belongs to it."""
        self._closed[micro_batch], self._open = self._open, []

    def forget(self) -> None:
        """Nothing is left of a step that did not end."""
        self._open.clear()
        self._closed.clear()

    def run(self, micro_batch: int) -> None:
        """Compute what a micro-batch has left; `.grad` accumulates it, and hooks run as always."""
        found = [pair for gradients in self._closed.pop(micro_batch) for pair in gradients()]
        # The stage's graph is as it was built: what the user froze since then is still in it.
        found = [(parameter, value) for parameter, value in found if parameter.requires_grad]
        if found:
            # A parameter is its own root: its AccumulateGrad node is all that runs.
            parameters, values = zip(*found, strict=True)
            torch.autograd.backward(parameters, values)


def defer_weight_gradients(module: fx.GraphModule) -> DeferredGradients:
    """Replace, in place, the layers of a stage whose weight gradients can wait.

    Args:
        module: the stage's graph, and graphs inside it.
    """
    deferred = DeferredGradients()
    graphs = [m for m in module.modules() if isinstance(m, fx.GraphModule)]
    uses = _uses(graphs)
    for number, part in enumerate(graphs):
        # The outermost graph first: named so that no parameter can have the name.
        name = f"_deferred_{number}"
        part.add_submodule(name, _Layers(deferred))
        for node in list(part.graph.nodes):
            if _can_wait(part, node, uses):
                operator = node.target
                with part.graph.inserting_before(node):
                    new = part.graph.call_module(name, (operator, *node.args), node.kwargs)
                new.meta = node.meta
                node.replace_all_uses_with(new)
                part.graph.erase_node(node)
        part.recompile()
    return deferred


def _uses(graphs: Sequence[fx.GraphModule]) -> Counter[int]:
    """How many nodes read each parameter, by its id."""
    uses: Counter[int] = Counter()
    for part in graphs:
        for node in part.graph.nodes:
            if node.op == "get_attr":
                uses[id(_value(part, node))] += len(node.users)
    return uses


def _value(part: fx.GraphModule, node: fx.Node) -> Any:
    found: Any = part
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def _can_wait(part: fx.GraphModule, node: fx.Node, uses: Counter[int]) -> bool:
    """A linear layer or convolution whose parameters are trained, and read here only."""
    if node.target is not _aten.linear.default and node.target not in _CONVOLUTIONS:
        return False
    parameters = [node.args[1], *node.args[2:3]]
    if "bias" in node.kwargs:
        parameters.append(node.kwargs["bias"])
    for argument in parameters:
        if argument is None:
            continue
        if not isinstance(argument, fx.Node) or argument.op != "get_attr":
            return False
        value = _value(part, argument)
        trained = isinstance(value, nn.Parameter) and value.requires_grad
        if not trained or uses[id(value)] != 1:
            return False
    weight = _value(part, parameters[0]) if isinstance(parameters[0], fx.Node) else None
    return weight is not None and weight.dim() > 1


class _Layers(nn.Module):
    """Stands in for the operators that were replaced."""

    def __init__(self, deferred: DeferredGradients) -> None:
        super().__init__()
        self._deferred = deferred
        # Makes outputs part of the graph even where only the hidden parameters need gradients.
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(
        self,
        operator: Any,
        inputs: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *options: Any,
        **named: Any,
    ) -> Any:
        layer: _Linear | _Convolution = _Linear()
        if operator is not _aten.linear.default:
            layer = _Convolution(_CONVOLUTIONS[operator], *options, **named)
        held = _Held(self._deferred, layer, weight, bias)
        return _Deferring.apply(held, inputs, self._anchor)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Held:
    """What a call of a layer uses. Parameters in here are hidden from autograd.

    It would otherwise call their hooks in the I half, with no gradient.
    """

    deferred: DeferredGradients
    layer: _Linear | _Convolution
    weight: nn.Parameter
    bias: nn.Parameter | None


class _Deferring(torch.autograd.Function):
    """A layer whose weight gradient waits."""

    @staticmethod
    def forward(ctx: Any, held: _Held, inputs: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        output = held.layer(inputs, held.weight, held.bias)
        # Under autocast the output's type is the one that is computed in.
        ctx.save_for_backward(inputs.to(output.dtype))
        ctx.held = held
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            # A batch norm behind it has a backward, though the loss does not depend on it.
            return None, None, None
        (inputs,) = ctx.saved_tensors
        held, needed = ctx.held, ctx.needs_input_grad[1]

        def gradients() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            weight, bias = held.weight, held.bias
            by_weight, by_bias = held.layer.by_weights(gradient, inputs, weight, bias is not None)
            yield weight, by_weight.to(weight.dtype)
            if bias is not None:
                yield bias, by_bias.to(bias.dtype)

        held.deferred.add(gradients)
        by_inputs = held.layer.by_inputs(gradient, inputs, held.weight) if needed else None
        return None, by_inputs, None


class _Linear:
    def __call__(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return nn.functional.linear(inputs, weight, bias)

    def by_inputs(
        self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return gradient @ weight.to(gradient.dtype)

    def by_weights(
        self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, with_bias: bool
    ) -> tuple[torch.Tensor, Any]:
        flat = gradient.reshape(-1, gradient.shape[-1])
        by_weight = flat.T @ inputs.reshape(-1, inputs.shape[-1])
        return by_weight, flat.sum(0) if with_bias else None


class _Convolution:
    """How a convolution goes over its input."""

    def __init__(
        self,
        dims: int,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> None:
        self._numbers = [_each(value, dims) for value in (stride, padding, dilation)]
        self._dims = dims
        self._groups = groups

    def __call__(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        zeros = [0] * self._dims
        output: torch.Tensor = _aten.convolution(
            inputs, weight, bias, *self._numbers, False, zeros, self._groups
        )
        return output

    def by_inputs(
        self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        found: torch.Tensor = self._gradients(gradient, inputs, weight, [True, False, False])[0]
        return found

    def by_weights(
        self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, with_bias: bool
    ) -> tuple[torch.Tensor, Any]:
        _, by_weight, by_bias = self._gradients(gradient, inputs, weight, [False, True, with_bias])
        return by_weight, by_bias

    def _gradients(
        self,
        gradient: torch.Tensor,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        wanted: list[bool],
    ) -> Any:
        return _aten.convolution_backward(
            gradient,
            inputs,
            weight.to(gradient.dtype),
            [weight.shape[0]],
            *self._numbers,
            False,
            [0] * self._dims,
            self._groups,
            wanted,
        )


def _each(value: Any, dims: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * dims if len(values) == 1 else values
