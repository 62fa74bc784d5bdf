"""Clean an exported graph so that it can be cut: no assertions, as few in-place operators as possible."""

from __future__ import annotations

import torch
from torch import fx

from dapple.graph.nodes import (
    alias_roots,
    is_assertion,
    is_call,
    is_mutation,
    mutated_arguments,
    region_of,
)


def normalise(module: fx.GraphModule) -> None:
    """Drop assertions, make local in-place operators functional, drop what nobody reads.

    An in-place operator whose target is read later only through its own result is replaced by the
    plain one (`relu_` by `relu`): on a tensor that came from another stage it would be an error,
    because that tensor is a leaf there. Writes into buffers stay.
    """
    graph = module.graph
    _drop_assertions(module)
    for node in list(graph.nodes):
        if is_mutation(node):
            _make_functional(graph, node)
    for node in reversed(list(graph.nodes)):
        unread = not node.users and node.op in ("call_function", "get_attr")
        if unread and not mutated_arguments(node):
            graph.erase_node(node)
    graph.lint()
    module.recompile()


def _drop_assertions(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        body = region_of(node)
        if body is not None:
            _drop_assertions(body)
        if is_assertion(node):
            module.graph.erase_node(node)
    module.recompile()


def _make_functional(graph: fx.Graph, node: fx.Node) -> None:
    targets = mutated_arguments(node)
    if len(targets) != 1:
        return
    roots = alias_roots(graph)
    root = roots[targets[0]]
    if root.op == "get_attr":
        return
    order = {n: i for i, n in enumerate(graph.nodes)}
    for other, other_root in roots.items():
        earlier = other_root is root and order[other] < order[node]
        if earlier and any(order[user] > order[node] for user in other.users):
            return
    plain = _functional_overload(node)
    if plain is not None:
        node.target = plain


def _functional_overload(node: fx.Node) -> torch._ops.OpOverload | None:
    target = node.target
    assert is_call(node)
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.name.split("::")[1]
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    if packet is None or target._overloadname not in packet.overloads():
        return None
    overload: torch._ops.OpOverload = getattr(packet, target._overloadname)
    return overload
