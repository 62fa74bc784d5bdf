"""Stage modules: a range of layers as a module of its own, under the model's parameter names."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx, nn

from dapple.graph.lengths import ROWS, size_for
from dapple.graph.nodes import attribute, is_call, is_random, mutated_arguments, region_body
from dapple.graph.program import BoundaryTensor, Program
from dapple.graph.recompute import Recomputed
from dapple.graph.seeds import SeedLayer, leave_generators, seed_layer

SEED = "seed"


@dataclass(frozen=True)
class StageProgram:
    """A stage's graph and what it reads and makes.

    Attributes:
        module: called with `rows`, `seed`, the user inputs and the boundary tensors that it reads;
            returns (made, results).
        reads_inputs: names of the model's inputs that it reads.
        reads: boundary tensors from earlier stages, in graph order.
        makes: boundary tensors for later stages, in graph order.
        has_results: it is the last stage and returns the model's outputs.
        is_random: it draws random numbers (dropout).
        writes_buffers: it writes into buffers (running statistics).
        parameter_order: names of its parameters and buffers, by their first use in the forward.
        recomputed: its layer ranges whose forward runs again before their backward.
    """

    module: fx.GraphModule
    reads_inputs: tuple[str, ...]
    reads: tuple[BoundaryTensor, ...]
    makes: tuple[BoundaryTensor, ...]
    has_results: bool
    is_random: bool
    writes_buffers: bool
    parameter_order: tuple[str, ...]
    recomputed: tuple[Recomputed, ...] = ()

    def __call__(
        self,
        rows: int,
        inputs: Mapping[str, Any],
        received: Mapping[str, torch.Tensor],
        seed: SeedLayer = leave_generators,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
        """Compute the stage on `rows` rows.

        Args:
            rows: rows of this piece.
            inputs: the model's inputs by name.
            received: boundary tensors by name.
            seed: called before each layer that draws random numbers.

        Returns:
            The boundary tensors in the order of `makes`, and the model's flat outputs (empty
            unless the stage is the last).
        """
        arguments: list[Any] = [rows, seed]
        arguments += [inputs[name] for name in self.reads_inputs]
        arguments += [received[tensor.name] for tensor in self.reads]
        made, results = self.module(*arguments)
        return made, results


Range = tuple[int, int]


def build_stage(
    program: Program,
    start: int,
    stop: int,
    names: Mapping[str, str],
    persistent: set[str],
    recompute: Sequence[Range] = (),
) -> StageProgram:
    """Cut layers start..stop out of a program.

    Args:
        program: the exported model.
        start: first layer.
        stop: layer after the last.
        names: the model's own name for each parameter and buffer of the graph; tied ones under
            one name.
        persistent: names of buffers that belong to the model's state_dict.
        recompute: half-open layer ranges of the stage, ascending, whose activations are not kept:
            their forward runs again in the backward.
    """
    return _StageBuilder(program, start, stop, names, persistent, recompute).build()


class _Body:
    """A graph that nodes of the program are copied into."""

    def __init__(self, program: Program, names: Mapping[str, str]) -> None:
        self.program = program
        self.names = names
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.rows = self.graph.placeholder(ROWS)
        self.seed = self.graph.placeholder(SEED)
        self._seeded: set[int] = set()

    def read(self, nodes: Iterable[fx.Node]) -> None:
        """Take the values of nodes from outside."""
        for node in nodes:
            self.made[node] = self.graph.placeholder(node.name)

    def value(self, node: fx.Node) -> fx.Node:
        """The copy of a node whose own arguments are there already."""
        if node not in self.made:
            self.made[node] = self._copy(node)
        return self.made[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        rows = self.program.row_count(node) if is_call(node) else None
        if rows is not None:
            return self._number(rows)
        if node.op == "get_attr":
            return self.graph.get_attr(self.names.get(str(node.target), str(node.target)))
        layer = self.program.layer_of.get(node)
        if layer is not None and layer not in self._seeded and is_random(node):
            self._seeded.add(layer)
            self.graph.call_function(seed_layer, (self.seed, layer))
        return self.graph.node_copy(node, lambda argument: self.made[argument])

    def _number(self, expression: sympy.Expr) -> fx.Node:
        """A size as a function of the rows that the stage is called with."""
        if expression == self.program.batch_symbol:
            return self.rows
        return self.graph.call_function(size_for, (self.rows, self.program.in_words(expression)))


@dataclass
class _StageBuilder:
    program: Program
    start: int
    stop: int
    names: Mapping[str, str]
    persistent: set[str]
    recompute: Sequence[Range]
    root: nn.Module = field(default_factory=nn.Module)
    recomputed: list[Recomputed] = field(default_factory=list)

    def build(self) -> StageProgram:
        program = self.program
        tensors = program.boundary_tensors()
        nodes = program.nodes_of(self.start, self.stop)
        last = self.stop == program.num_layers
        results = [v for v in program.outputs if isinstance(v, fx.Node)] if last else []
        needed = self._closure([*nodes, *results], self.start, self.stop)
        reads_inputs = [n for n in program.placeholders if n in needed]
        reads = [n for n in tensors if n in needed and program.layer_of[n] < self.start]
        body = _Body(program, self.names)
        body.read([*reads_inputs, *reads])
        self._fill(body, nodes, results)
        makes = self._leaving(self.start, self.stop)
        outputs: list[Any] = []
        if last:
            outputs = [body.made[v] if isinstance(v, fx.Node) else v for v in program.outputs]
        body.graph.output((tuple(body.made[n] for n in makes), tuple(outputs)))
        body.graph.lint()
        self._attach(body.made)
        return StageProgram(
            module=fx.GraphModule(self.root, body.graph),
            reads_inputs=tuple(n.name for n in reads_inputs),
            reads=tuple(tensors[n] for n in reads),
            makes=tuple(tensors[n] for n in makes),
            has_results=last,
            is_random=any(is_random(n) for n in nodes),
            writes_buffers=bool(program.written_buffers(self.start, self.stop)),
            parameter_order=self._parameter_order(needed),
            recomputed=tuple(self.recomputed),
        )

    def _parameter_order(self, needed: set[fx.Node]) -> tuple[str, ...]:
        order = self.program.order

        def first_use(node: fx.Node) -> tuple[int, int]:
            return min((order[n] for n in node.users if n in needed), default=0), order[node]

        own = sorted((n for n in needed if n.op == "get_attr"), key=first_use)
        return tuple(self.names.get(str(n.target), str(n.target)) for n in own)

    def _fill(self, body: _Body, nodes: list[fx.Node], results: list[fx.Node]) -> None:
        """Copy the stage's nodes, and put each recomputed range in as one call."""
        program = self.program
        range_of = {n: r for r in self.recompute for n in program.nodes_of(*r)}
        plain = [n for n in nodes if n not in range_of]
        needed = self._closure([*plain, *results], self.start, self.stop, set(range_of))
        folded: set[Range] = set()
        for node in program.graph.nodes:
            where = range_of.get(node)
            if where is None:
                if node in needed:
                    body.value(node)
            elif where not in folded:
                folded.add(where)
                self._fold(body, *where)

    def _fold(self, body: _Body, start: int, stop: int) -> None:
        """Put a recomputed range into the stage's graph as one call."""
        program = self.program
        nodes = program.nodes_of(start, stop)
        needed = self._closure(nodes, start, stop)
        ordered = [n for n in program.graph.nodes if n in needed]
        # The body of a region such as autocast is no value; who looks into the range finds it there.
        regions = {n: found for n in ordered if (found := region_body(n)) is not None}
        leaves = [
            n
            for n in ordered
            if n not in regions and (not is_call(n) or _is_outside(program, n, start, stop))
        ]
        root = nn.Module()
        for node, region in regions.items():
            root.add_module(str(node.target), region)
        inner = _Body(program, self.names)
        inner.read(leaves)
        for node in ordered:
            inner.value(node)
        results = [v for v in program.outputs if isinstance(v, fx.Node) and v in nodes]
        leaving = list(dict.fromkeys([*self._leaving(start, stop), *results]))
        inner.graph.output(tuple(inner.made[n] for n in leaving))
        inner.graph.lint()
        written = {program.roots[a] for n in nodes for a in mutated_arguments(n)}
        given = len((ROWS, SEED))
        module = Recomputed(
            fx.GraphModule(root, inner.graph),
            tuple(given + i for i, leaf in enumerate(leaves) if program.roots[leaf] in written),
        )
        self.recomputed.append(module)
        name = f"recomputed_{start}_{stop}"
        self.root.add_module(name, module)
        arguments = (body.rows, body.seed, *(body.value(leaf) for leaf in leaves))
        call = body.graph.create_node("call_module", name, arguments)
        for position, node in enumerate(leaving):
            body.made[node] = body.graph.call_function(operator.getitem, (call, position))

    def _leaving(self, start: int, stop: int) -> list[fx.Node]:
        """Tensors of layers start..stop that later layers read, in graph order."""
        return [
            node
            for node, tensor in self.program.boundary_tensors().items()
            if start <= tensor.producer < stop and tensor.consumers[-1] >= stop
        ]

    def _closure(
        self,
        wanted: Iterable[fx.Node],
        start: int,
        stop: int,
        given: Iterable[fx.Node] = (),
    ) -> set[fx.Node]:
        """What layers start..stop need: nodes, values recomputed here, parameters, inputs."""
        needed: set[fx.Node] = set()
        waiting = list(wanted)
        while waiting:
            node = waiting.pop()
            if node in needed:
                continue
            needed.add(node)
            outside = node in given or _is_outside(self.program, node, start, stop)
            if not outside and self.program.row_count(node) is None:
                waiting += node.all_input_nodes
        return needed

    def _attach(self, made: Iterable[fx.Node]) -> None:
        """Give the stage the parameters and buffers that it reads, under the model's names."""
        for node in made:
            if node.op != "get_attr":
                continue
            path = str(node.target)
            value = attribute(self.program.module, path)
            *parents, leaf = self.names.get(path, path).split(".")
            holder = self.root
            for part in parents:
                if part not in dict(holder.named_children()):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            if isinstance(value, nn.Parameter):
                holder.register_parameter(leaf, value)
            elif isinstance(value, torch.Tensor):
                holder.register_buffer(leaf, value, persistent=path in self.persistent)
            else:
                setattr(holder, leaf, value)


def _is_outside(program: Program, node: fx.Node, start: int, stop: int) -> bool:
    return node in program.layer_of and not start <= program.layer_of[node] < stop
