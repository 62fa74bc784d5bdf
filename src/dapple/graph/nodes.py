"""What a node of an exported graph does: aliasing, mutation, randomness, rows, gradients.

Everything here reads operator schemas and fake values; nothing is keyed on a model's class names.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

# Operators that may return their input itself although the schema does not say so.
_MAY_ALIAS = {
    "aten.contiguous.default",
    "aten.dropout.default",
    "aten.expand_as.default",
    "aten.flatten.using_ints",
    "aten.reshape.default",
    "aten.to.device",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.view_as.default",
}
# Operators that draw random numbers although they carry no tag.
_RANDOM = {
    "aten.alpha_dropout.default",
    "aten.bernoulli.p",
    "aten.bernoulli_.float",
    "aten.dropout.default",
    "aten.feature_dropout.default",
    "aten.rrelu.default",
}
# Carry the tag, but draw random numbers for dropout between their layers only.
_RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")
_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain")


OPAQUE = "opaque"


@dataclass(frozen=True)
class Opaque:
    """What is known of a node that runs a layer as it is; kept in its `meta`.

    Attributes:
        written: positions of the arguments that it writes into.
        aliased: position of the argument that its result may share memory with.
        is_random: it draws random numbers.
        batch_norm: name of a batch norm in it that takes statistics of the batch.
    """

    written: tuple[int, ...]
    aliased: int | None
    is_random: bool
    batch_norm: str | None


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that made the node; "" for the model's own forward."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = list(stack.values())
    path = entries[-1][0] if entries else ""
    # A module that is called twice has its second call marked as "path@1".
    return str(path).split("@")[0]


def is_call(node: fx.Node) -> bool:
    """The node computes something."""
    return node.op == "call_function"


def is_assertion(node: fx.Node) -> bool:
    """The node only checks; autocast breaks such checks and they keep values alive over cuts."""
    if node.op == "call_module":
        return node.target == "_guards_fn"
    return is_call(node) and any(name in str(node.target) for name in _ASSERTIONS)


def is_tensor(node: fx.Node) -> bool:
    """The node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_symbol(node: fx.Node) -> bool:
    """The node's value is a number: a size or something computed from sizes."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def is_mutation(node: fx.Node) -> bool:
    """The node writes into one of its arguments."""
    target = node.target
    return is_call(node) and isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes into."""
    opaque = node.meta.get(OPAQUE)
    if opaque is not None:
        return [a for i in opaque.written if isinstance(a := node.args[i], fx.Node)]
    body = region_of(node)
    if body is not None:
        written = {a for n in body.graph.nodes for a in mutated_arguments(n)}
        return [given for given, own in region_arguments(node, body) if own in written]
    if updates_statistics(node) or _is_tracking_instance_norm(node):
        return [a for a in node.args[3:5] if isinstance(a, fx.Node)]
    if not is_mutation(node):
        return []
    found = []
    for position, argument in enumerate(_schema(node).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = _argument(node, position, argument.name)
            values = value if isinstance(value, list | tuple) else [value]
            found += [v for v in values if isinstance(v, fx.Node)]
    return found


def updates_statistics(node: fx.Node) -> bool:
    """The node is a batch norm in training mode: it uses and updates statistics of all rows."""
    if any(updates_statistics(inner) for inner in _inner(node)):
        return True
    if not is_call(node) or "batch_norm" not in str(node.target):
        return False
    return any(argument is True for argument in node.args[5:6])


def is_random(node: fx.Node) -> bool:
    """The node draws random numbers."""
    if not is_call(node):
        return False
    opaque = node.meta.get(OPAQUE)
    if opaque is not None:
        return bool(opaque.is_random)
    if any(is_random(inner) for inner in _inner(node)):
        return True
    name = str(node.target)
    if name.startswith("aten.scaled_dot_product_attention"):
        return bool(_argument(node, 4, "dropout_p") or 0.0)
    if name == "aten.dropout.default":
        return node.args[2] is True and bool(node.args[1])
    if isinstance(node.target, torch._ops.OpOverload):
        if name.startswith(_RECURRENT):
            return bool(_named(node, "dropout")) and bool(_named(node, "train"))
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return "dropout" not in name or bool(node.args[1])
        return name in _RANDOM or "rand" in name
    return False


def alias_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the node whose memory it may share; itself where it shares none."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        aliased = _aliased_argument(node)
        roots[node] = node if aliased is None else roots[aliased]
    return roots


def attribute(module: nn.Module, path: str) -> Any:
    """The attribute at a dotted path."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def needs_gradient(module: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Floating nodes that depend on a trainable parameter."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            value = attribute(module, str(node.target))
            if isinstance(value, nn.Parameter) and value.requires_grad:
                found.add(node)
        elif is_call(node) and "detach" not in str(node.target):
            if not is_tensor(node):
                # A tuple of tensors, or a number; numbers never carry gradients.
                floating = not is_symbol(node)
            else:
                kind = node.meta["val"].dtype
                floating = kind.is_floating_point or kind.is_complex
            if floating and any(a in found for a in node.all_input_nodes):
                found.add(node)
    return found


def region_of(node: fx.Node) -> fx.GraphModule | None:
    """The body that a node runs, such as of an autocast or no_grad region; None for an operator."""
    if not is_call(node) or isinstance(node.target, torch._ops.OpOverload):
        return None
    bodies = [region_body(argument) for argument in node.all_input_nodes]
    return next((body for body in bodies if body is not None), None)


def region_arguments(node: fx.Node, body: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of what a region is given and its own name for it."""
    given = [a for a in node.args if isinstance(a, fx.Node) and not region_body(a)]
    own = [n for n in body.graph.nodes if n.op == "placeholder"]
    return list(zip(given, own, strict=True))


def _is_tracking_instance_norm(node: fx.Node) -> bool:
    # It writes its running statistics, which the schema does not say.
    return is_call(node) and "instance_norm" in str(node.target) and node.args[5] is True


def region_body(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node stands for, if it is the body of a region such as autocast."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    value = attribute(owner, str(node.target))
    return value if isinstance(value, fx.GraphModule) else None


def _inner(node: fx.Node) -> list[fx.Node]:
    """The nodes inside of a region that a node runs."""
    body = region_of(node)
    return [] if body is None else list(body.graph.nodes)


def _schema(node: fx.Node) -> Any:
    return node.target._schema  # type: ignore[union-attr]


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _named(node: fx.Node, name: str) -> Any:
    names = [argument.name for argument in _schema(node).arguments]
    return _argument(node, names.index(name), name)


def _aliased_argument(node: fx.Node) -> fx.Node | None:
    if not is_call(node):
        return None
    opaque = node.meta.get(OPAQUE)
    if opaque is not None:
        given = None if opaque.aliased is None else node.args[opaque.aliased]
        return given if isinstance(given, fx.Node) else None
    if node.target is operator.getitem:
        first = node.args[0]
        return first if isinstance(first, fx.Node) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returned = set()
    for result in _schema(node).returns:
        if result.alias_info is not None:
            returned |= set(result.alias_info.before_set)
    for position, argument in enumerate(_schema(node).arguments):
        info = argument.alias_info
        if info is not None and (set(info.before_set) & returned or "*" in info.after_set):
            value = _argument(node, position, argument.name)
            if isinstance(value, fx.Node):
                return value
    if str(node.target) in _MAY_ALIAS and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None
