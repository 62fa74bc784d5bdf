"""A model run layer by layer, as a pipeline with one layer per stage on one device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dapple.graph import LayerGraph, StageProgram
from dapple.graph.norms import batch_norms
from dapple.graph.precision import Precision
from dapple.workload import Workload


@dataclass
class ChainPass:
    """What one pass through all layers measured.

    Attributes:
        forward_seconds, backward_seconds: one entry per layer, s.
    """

    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)


class Observer:
    """Told what happens around each layer; does nothing by itself."""

    def forward(self, layer: int, run: Callable[[], Any]) -> Any:
        """Around the forward of a layer."""
        return run()

    def backward(self, layer: int, incoming_bytes: int, run: Callable[[], Any]) -> Any:
        """Around the backward of a layer, whose output gradients take `incoming_bytes`."""
        return run()

    def made(self, layer: int, tensor: torch.Tensor) -> None:
        """A layer has made a tensor that later layers read."""


class Chain:
    """Runs a captured model layer by layer; tensors between layers are leaves, as in a pipeline.

    Args:
        graph: the captured model.
        workload: example inputs, targets and the loss.
        rows: batch size.
        device: where it runs; the model is moved there.
        precision: what it computes in; by default the model's own types.
    """

    def __init__(
        self,
        graph: LayerGraph,
        workload: Workload,
        rows: int,
        device: torch.device,
        precision: Precision | None = None,
    ) -> None:
        self.precision = precision or Precision("float32", device)
        self._graph = graph
        self._device = device
        self._rows = rows
        self.layers: list[StageProgram] = [
            self.precision.around(graph.stage(i, i + 1)) for i in range(graph.num_layers)
        ]
        for layer in self.layers:
            # Fake tensors can't be moved, nor need they be.
            held = (*layer.module.parameters(), *layer.module.buffers())
            if any(tensor.device != device for tensor in held):
                layer.module.to(device)
        named = graph.flatten_inputs(workload.inputs(rows))
        self._inputs = {
            n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in named.items()
        }
        targets = workload.targets(rows) if workload.targets is not None else None
        self._targets = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), targets)

    def statistics_bytes(self, layer: int) -> tuple[int, ...]:
        """Of each batch norm of a layer, the bytes of two numbers per channel."""
        return tuple(norm.pair_bytes for norm in batch_norms(self.layers[layer].module))

    def input_storages(self) -> set[int]:
        """Storages of the batch itself, which every rank holds anyway."""
        leaves = pytree.tree_leaves((self._inputs, self._targets))
        return {t.untyped_storage()._cdata for t in leaves if isinstance(t, torch.Tensor)}

    def run(self, observer: Observer | None = None) -> ChainPass:
        """One forward and one backward through all layers."""
        with self.precision.step():
            return self._run(observer or Observer())

    def _run(self, watch: Observer) -> ChainPass:
        result = ChainPass()
        values: dict[str, torch.Tensor] = {}
        roots: list[list[torch.Tensor]] = []
        leaves: list[dict[str, torch.Tensor]] = []
        for number, layer in enumerate(self.layers):
            received = {}
            for tensor in layer.reads:
                leaf = values[tensor.name].detach()
                received[tensor.name] = leaf.requires_grad_() if tensor.needs_grad else leaf
            begin = self._now()
            made = watch.forward(number, functools.partial(self._forward, layer, received))
            result.forward_seconds.append(self._now() - begin)
            for tensor, value in zip(layer.makes, made, strict=False):
                values[tensor.name] = value.detach()
                watch.made(number, value)
            leaves.append(received)
            roots.append(made)
        gradients: dict[str, torch.Tensor] = {}
        result.backward_seconds = [0.0] * len(self.layers)
        for number in reversed(range(len(self.layers))):
            layer, received = self.layers[number], leaves.pop()
            outputs, starts = self._starts(layer, roots.pop(), gradients)
            incoming = sum(s.nbytes for s in starts if s is not None)
            begin = self._now()
            if outputs:
                watch.backward(
                    number, incoming, functools.partial(torch.autograd.backward, outputs, starts)
                )
            result.backward_seconds[number] = self._now() - begin
            del outputs, starts
            for name, leaf in received.items():
                if leaf.grad is not None:
                    known = gradients.get(name)
                    gradients[name] = leaf.grad if known is None else known + leaf.grad
            received.clear()
        return result

    def clear_gradients(self) -> None:
        """Drop the parameters' gradients."""
        for layer in self.layers:
            for parameter in layer.module.parameters():
                parameter.grad = None

    def _forward(
        self, layer: StageProgram, received: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        made, results = layer(self._rows, self._inputs, received)
        if not layer.has_results:
            return list(made)
        output = self._graph.unflatten_outputs(results)
        with self.precision.forward():
            return [self._graph.loss_of(output, self._targets)]

    def _starts(
        self, layer: StageProgram, made: list[torch.Tensor], gradients: dict[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        if layer.has_results:
            return [t for t in made if t.requires_grad], [None for t in made if t.requires_grad]
        outputs: list[torch.Tensor] = []
        starts: list[torch.Tensor | None] = []
        for tensor, value in zip(layer.makes, made, strict=True):
            gradient = gradients.pop(tensor.name, None)
            if value.requires_grad and gradient is not None:
                outputs.append(value)
                starts.append(gradient)
        return outputs, starts

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
