"""Batch norms of a stage, and buffers whose new values depend on the rows of a piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn

from dapple.graph.nodes import (
    alias_roots,
    is_call,
    is_random,
    mutated_arguments,
    region_arguments,
    region_of,
    updates_statistics,
)

NAME = "batch_statistics"


@dataclass(frozen=True)
class BatchNormSpec:
    """A batch norm in training mode.

    Attributes:
        channels: its number of channels.
        dtype: of its input, as captured.
    """

    channels: int
    dtype: torch.dtype

    @property
    def pair_bytes(self) -> int:
        """Bytes of two numbers per channel in the type of the sums."""
        return 2 * self.channels * sum_dtype(self.dtype).itemsize


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which statistics of an input of some type are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def route_batch_norms(module: fx.GraphModule, route: nn.Module) -> tuple[BatchNormSpec, ...]:
    """Have `route` compute every batch norm in training mode, also those in regions.

    Args:
        module: a stage's module, changed in place.
        route: called with (position, input, weight, bias, running mean, running variance,
            momentum, epsilon); positions count the batch norms in the order of execution.

    Returns:
        The batch norms by position.
    """
    found: list[BatchNormSpec] = []
    _route(module, route, found)
    return tuple(found)


def _route(module: fx.GraphModule, route: nn.Module, found: list[BatchNormSpec]) -> None:
    own = False
    for node in list(module.graph.nodes):
        bodies = list(_bodies(module, node))
        for body in bodies:
            _route(body, route, found)
        if bodies or not updates_statistics(node):
            continue
        if not own:
            module.add_submodule(NAME, route)
            own = True
        with module.graph.inserting_before(node):
            *inputs, _, momentum, epsilon, _ = node.args
            routed = module.graph.call_module(NAME, (len(found), *inputs, momentum, epsilon))
        routed.meta = dict(node.meta)
        node.replace_all_uses_with(routed)
        module.graph.erase_node(node)
        found.append(_spec(routed))
    if own:
        module.graph.lint()
        module.recompile()


def batch_norms(module: nn.Module) -> Iterator[BatchNormSpec]:
    """The batch norms in training mode of a stage's module, in the order of execution."""
    for graph in _outermost(module):
        for node in graph.graph.nodes:
            bodies = list(_bodies(graph, node))
            for body in bodies:
                yield from batch_norms(body)
            if not bodies and updates_statistics(node):
                yield _spec(node)


def _spec(node: fx.Node) -> BatchNormSpec:
    value = node.meta["val"]
    return BatchNormSpec(int(value.shape[1]), value.dtype)


def _bodies(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graphs that a node runs."""
    region = region_of(node)
    if region is not None:
        yield region
    elif node.op == "call_module":
        yield from _outermost(module.get_submodule(str(node.target)))


def _outermost(module: nn.Module) -> Iterator[fx.GraphModule]:
    if isinstance(module, fx.GraphModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def written_by_rows(graph: fx.Graph, dependent: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Nodes that write what depends on the rows of a piece, each with the roots it writes into.

    The running statistics of a batch norm don't count: they have a rule of their own.

    Args:
        graph: an exported graph, or the body of a region.
        dependent: its inputs that depend on the rows.
    """
    depends, roots = set(dependent), alias_roots(graph)
    written: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if not is_call(node) or not (is_random(node) or depends.intersection(node.all_input_nodes)):
            continue
        depends.add(node)
        body = region_of(node)
        if body is not None:
            pairs = region_arguments(node, body)
            inner = written_by_rows(body.graph, {own for given, own in pairs if given in depends})
            inside = {own for owns in inner.values() for own in owns}
            targets = [given for given, own in pairs if own in inside]
        else:
            targets = [] if updates_statistics(node) else mutated_arguments(node)
        if targets:
            written[node] = [roots[target] for target in targets]
            depends |= {member for member, root in roots.items() if root in written[node]}
    return written
