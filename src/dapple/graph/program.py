"""An exported model as a row of layers that can be cut between any two.

    nodes      n0 n1 n2 | n3 n4 n5 n6 | n7 n8        the graph, in order of execution
    layers     embed    | blocks.0    | head         runs of nodes of one unit
    values        n2 --------> n5                    cross the cuts between producer and consumers
                          n6 -------> n7

Values that depend on integer inputs and constants only (masks, position numbers) belong to no
layer: each stage that reads them computes them again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import sympy
import torch
from torch import fx, nn

from dapple.graph.lengths import ROWS, Rows, size_for, symbol_of
from dapple.graph.nodes import (
    OPAQUE,
    Opaque,
    alias_roots,
    attribute,
    is_call,
    is_mutation,
    is_random,
    is_symbol,
    is_tensor,
    module_path,
    mutated_arguments,
    needs_gradient,
    updates_statistics,
)
from dapple.graph.norms import written_by_rows
from dapple.graph.units import Units


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that one layer makes and later layers read.

    Attributes:
        name: its node's name.
        producer: the layer that makes it.
        consumers: the layers that read it, ascending.
        shape: its shape for a batch of one row.
        row_dim: the dimension that holds the rows; None: the tensor is the same for every row.
        dtype: its type.
        needs_grad: a gradient travels back.
        lengths: dimensions that change from step to step, as expressions; `shape` has what they
            were at capture.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    shape: tuple[int, ...]
    row_dim: int | None
    dtype: torch.dtype
    needs_grad: bool
    lengths: tuple[tuple[int, str], ...] = ()

    def shape_for(self, rows: int) -> tuple[int, ...]:
        """Its shape for a piece of `rows` rows, and of their lengths if they know any."""
        shape = list(self.shape)
        if self.row_dim is not None:
            shape[self.row_dim] = int(rows)
        if isinstance(rows, Rows):
            for dim, expression in self.lengths:
                shape[dim] = size_for(rows, expression)
        return tuple(shape)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row, or of the whole tensor where it has no rows."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class Program:
    """One export of the model (training or evaluation mode) with its nodes sorted into layers.

    Args:
        module: the normalised graph module.
        units: the model's units.
        batch_symbol: the symbol of the batch size, None if the model was exported at a fixed one.
        length_symbols: the names of further sizes that change, by their symbols.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        units: Units,
        batch_symbol: sympy.Symbol | None,
        length_symbols: Mapping[sympy.Symbol, str] | None = None,
    ) -> None:
        self.module = module
        self.graph = module.graph
        self.batch_symbol = batch_symbol
        self._names = {s: symbol_of(name) for s, name in (length_symbols or {}).items()}
        if batch_symbol is not None:
            self._names[batch_symbol] = sympy.Symbol(ROWS, integer=True)
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.roots = alias_roots(self.graph)
        self.with_gradient = needs_gradient(module, self.graph)
        output = next(n for n in self.graph.nodes if n.op == "output")
        result = output.args[0]
        self.outputs: tuple[object, ...] = (
            tuple(result) if isinstance(result, list | tuple) else (result,)
        )
        self.mutated_roots = {self.roots[a] for n in self.graph.nodes for a in mutated_arguments(n)}
        self.recomputed = self._find_recomputed()
        self.unit_names, self.layer_of = self._group(units)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.unit_names)

    def nodes_of(self, start: int, stop: int) -> list[fx.Node]:
        """The nodes of layers start..stop in order of execution."""
        return [n for n, layer in self.layer_of.items() if start <= layer < stop]

    def attributes(self) -> list[str]:
        """Names in the graph of the parameters and buffers that it reads."""
        return [str(n.target) for n in self.graph.nodes if n.op == "get_attr"]

    def merge(self, boundaries: Iterable[int]) -> None:
        """Join the layers before and after each boundary (boundary b lies before layer b)."""
        gone = set(boundaries)
        new_number, names, number = [], [], -1
        for layer, name in enumerate(self.unit_names):
            if layer == 0 or layer not in gone:
                number += 1
                names.append(name)
            new_number.append(number)
        self.unit_names = names
        self.layer_of = {n: new_number[layer] for n, layer in self.layer_of.items()}

    def boundary_tensors(self) -> dict[fx.Node, BoundaryTensor]:
        """All tensors that are read by a later layer than their own, in graph order."""
        found = {}
        for node, readers in self._readers().items():
            shape, row_dim = self._shape(node) or ((), None)
            found[node] = BoundaryTensor(
                name=node.name,
                producer=self.layer_of[node],
                consumers=tuple(sorted(readers)),
                shape=shape,
                row_dim=row_dim,
                dtype=node.meta["val"].dtype,
                needs_grad=node in self.with_gradient,
                lengths=self._lengths(node) if is_tensor(node) else (),
            )
        return found

    def illegal_boundaries(self) -> dict[int, str]:
        """Boundaries where the graph can't be cut, each with the reason.

        A tensor may cross if its rows lie in one dimension, one after the other. Numbers computed
        from data may not, nor may memory that a later layer writes into.
        """
        illegal: dict[int, str] = {}

        def forbid(first: int, last: int, reason: str) -> None:
            for boundary in range(first + 1, last + 1):
                illegal.setdefault(boundary, reason)

        for node, readers in self._readers().items():
            layer = self.layer_of[node]
            if not is_tensor(node):
                forbid(layer, max(readers), f"{node.name} is no tensor")
            elif self._shape(node) is None:
                shape = tuple(node.meta["val"].shape)
                forbid(
                    layer, max(readers), f"the rows of {node.name} {shape} lie in no one dimension"
                )
        for root in self.mutated_roots:
            members = [member for member, its_root in self.roots.items() if its_root is root]
            users = {user for member in members for user in (member, *member.users)}
            writers = {u for u in users if root in (self.roots[a] for a in mutated_arguments(u))}
            if is_call(root) and all(OPAQUE in writer.meta for writer in writers):
                # Who reads what a layer as it is has written reads its result, after the write.
                users = {root, *writers}
            layers = [self.layer_of[user] for user in users if user in self.layer_of]
            if layers:
                forbid(min(layers), max(layers), f"{root.name} is written in place")
        return illegal

    def parameters_of(self, layer: int) -> list[str]:
        """Names in the graph of the parameters that a layer reads, in order of first use."""
        sources = [s for n in self.nodes_of(layer, layer + 1) for s in n.all_input_nodes]
        if layer == self.num_layers - 1:
            # A parameter that the model returns as it is gets gradients from the loss.
            sources += [v for v in self.outputs if isinstance(v, fx.Node)]
        found: dict[str, None] = {}
        for source in sources:
            if source.op == "get_attr" and isinstance(
                attribute(self.module, str(source.target)), nn.Parameter
            ):
                found[str(source.target)] = None
        return list(found)

    def uses_batch_statistics(self, start: int, stop: int) -> bool:
        """Some layer of the range is a batch norm in training mode."""
        return any(updates_statistics(n) for n in self.nodes_of(start, stop))

    def written_buffers(self, start: int, stop: int, by_rows: bool = False) -> list[str]:
        """Names in the graph of the buffers that layers of the range write into.

        Args:
            start, stop: the layers, a half-open range.
            by_rows: only those whose new value depends on the rows, other than by a batch norm.
        """
        nodes = self.nodes_of(start, stop)
        roots = [r for n in nodes for r in self._written_by_rows.get(n, ())]
        if not by_rows:
            roots = [self.roots[a] for n in nodes for a in mutated_arguments(n)]
        return list(dict.fromkeys(str(r.target) for r in roots if r.op == "get_attr"))

    def opaque_layers(self, start: int, stop: int) -> list[Opaque]:
        """What is known of the layers of a range that are taken as they are."""
        return [n.meta[OPAQUE] for n in self.nodes_of(start, stop) if OPAQUE in n.meta]

    @cached_property
    def _written_by_rows(self) -> dict[fx.Node, list[fx.Node]]:
        rows = {
            n
            for n in self.placeholders
            if is_tensor(n) and any(isinstance(d, torch.SymInt) for d in n.meta["val"].shape)
        }
        return written_by_rows(self.graph, rows)

    def row_dim(self, node: fx.Node) -> int | None:
        """The dimension of a tensor that holds the rows; None if no single one does."""
        shape = self._shape(node)
        return None if shape is None else shape[1]

    def row_count(self, node: fx.Node) -> sympy.Expr | None:
        """The number that a size node stands for, as an expression in the batch size."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            expression = value.node.expr
            if expression.free_symbols <= set(self._names):
                return expression
        return None

    def in_words(self, expression: sympy.Expr) -> str:
        """An expression in the batch size and lengths, as `size_for` takes it."""
        return str(expression.subs(self._names))

    def _find_recomputed(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                value = node.meta.get("val")
                floating = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
                if not floating and self.roots[node] not in self.mutated_roots:
                    found.add(node)
            elif node.op == "get_attr":
                value = attribute(self.module, str(node.target))
                parameter = isinstance(value, nn.Parameter)
                if not parameter and self.roots[node] not in self.mutated_roots:
                    found.add(node)
            elif is_call(node) and (self.row_count(node) is not None or self._is_pure(node, found)):
                found.add(node)
        return found

    def _is_pure(self, node: fx.Node, recomputed: set[fx.Node]) -> bool:
        return (
            not is_mutation(node)
            and not is_random(node)
            and self.roots[node] not in self.mutated_roots
            and all(a in recomputed for a in node.all_input_nodes)
        )

    def _group(self, units: Units) -> tuple[list[str], dict[fx.Node, int]]:
        names: list[str] = []
        layer_of: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if not is_call(node) or node in self.recomputed:
                continue
            if node.target is operator.getitem and node.args[0] in layer_of:
                layer_of[node] = layer_of[node.args[0]]
                continue
            unit = units.of(module_path(node))
            new = unit and (not names or unit != names[-1])
            # Layers without parameters (activations, pooling) go with the layer before.
            if new and (not names or units.has_parameters(unit)):
                if names and names[-1] == "":
                    names[-1] = unit
                else:
                    names.append(unit)
            elif not names:
                names.append("")
            layer_of[node] = len(names) - 1
        if not names:
            names.append("")
        if names[0] == "":
            names[0] = "model"
        return names, layer_of

    def _readers(self) -> dict[fx.Node, set[int]]:
        last = self.num_layers - 1
        readers: dict[fx.Node, set[int]] = {}
        for node, layer in self.layer_of.items():
            for source in node.all_input_nodes:
                if source in self.layer_of and self.layer_of[source] != layer:
                    readers.setdefault(source, set()).add(layer)
        # The last layer hands out the model's results, wherever they were made.
        for value in self.outputs:
            if isinstance(value, fx.Node) and self.layer_of.get(value, last) != last:
                readers.setdefault(value, set()).add(last)
        return dict(sorted(readers.items(), key=lambda item: self.order[item[0]]))

    def _shape(self, node: fx.Node) -> tuple[tuple[int, ...], int | None] | None:
        """Shape for one row and the row dimension; None where rows are not in one dimension."""
        if is_symbol(node) or not is_tensor(node):
            return None
        shape, row_dim = [], None
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                shape.append(size)
            elif size.node.expr == self.batch_symbol and row_dim is None:
                row_dim = dim
                shape.append(1)
            elif self._is_length(size):
                shape.append(int(size.node.hint))
            else:
                return None
        return tuple(shape), row_dim

    def _is_length(self, size: torch.SymInt) -> bool:
        """A size that depends on lengths, and not on the batch."""
        symbols = size.node.expr.free_symbols
        return bool(symbols) and symbols <= set(self._names) - {self.batch_symbol}

    def _lengths(self, node: fx.Node) -> tuple[tuple[int, str], ...]:
        return tuple(
            (dim, self.in_words(size.node.expr))
            for dim, size in enumerate(node.meta["val"].shape)
            if isinstance(size, torch.SymInt) and self._is_length(size)
        )
