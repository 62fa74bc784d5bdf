"""Stage modules: a range of layers as a module of its own, under the model's parameter names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx, nn

from dapple.graph.nodes import attribute, is_call, is_random
from dapple.graph.program import BoundaryTensor, Program

ROWS = "rows"


@dataclass(frozen=True)
class StageProgram:
    """A stage's graph and what it reads and makes.

    Attributes:
        module: called with keyword arguments `rows`, user inputs and boundary tensors by name;
            returns (made, results).
        reads_inputs: names of the model's inputs that it reads.
        reads: boundary tensors from earlier stages, in graph order.
        makes: boundary tensors for later stages, in graph order.
        has_results: it is the last stage and returns the model's outputs.
        is_random: it draws random numbers (dropout).
        writes_buffers: it writes into buffers (running statistics).
        parameter_order: names of its parameters and buffers, by their first use in the forward.
    """

    module: fx.GraphModule
    reads_inputs: tuple[str, ...]
    reads: tuple[BoundaryTensor, ...]
    makes: tuple[BoundaryTensor, ...]
    has_results: bool
    is_random: bool
    writes_buffers: bool
    parameter_order: tuple[str, ...]

    def __call__(
        self, rows: int, inputs: Mapping[str, Any], received: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
        """Compute the stage on `rows` rows.

        Returns:
            The boundary tensors in the order of `makes`, and the model's flat outputs (empty
            unless the stage is the last).
        """
        arguments: list[Any] = [rows]
        arguments += [inputs[name] for name in self.reads_inputs]
        arguments += [received[tensor.name] for tensor in self.reads]
        made, results = self.module(*arguments)
        return made, results


def size_for(rows: int, expression: str) -> int:
    """A size that depends on the batch, such as "64*rows".

    >>> size_for(3, "64*rows")
    192
    """
    return int(_compiled(expression)(rows))


@functools.cache
def _compiled(expression: str) -> Callable[[int], float]:
    function: Callable[[int], float] = sympy.lambdify(
        sympy.Symbol(ROWS), sympy.sympify(expression), modules="math"
    )
    return function


def build_stage(
    program: Program, start: int, stop: int, names: Mapping[str, str], persistent: set[str]
) -> StageProgram:
    """Cut layers start..stop out of a program.

    Args:
        program: the exported model.
        start: first layer.
        stop: layer after the last.
        names: the model's own name for each parameter and buffer of the graph; tied ones under
            one name.
        persistent: names of buffers that belong to the model's state_dict.
    """
    return _StageBuilder(program, start, stop, names, persistent).build()


@dataclass
class _StageBuilder:
    program: Program
    start: int
    stop: int
    names: Mapping[str, str]
    persistent: set[str]
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def build(self) -> StageProgram:
        program = self.program
        tensors = program.boundary_tensors()
        nodes = program.nodes_of(self.start, self.stop)
        last = self.stop == program.num_layers
        results = [v for v in program.outputs if isinstance(v, fx.Node)] if last else []
        needed = self._closure([*nodes, *results])
        rows = self.graph.placeholder(ROWS)
        reads_inputs = [n for n in program.placeholders if n in needed]
        reads = [n for n in tensors if n in needed and program.layer_of[n] < self.start]
        for source in (*reads_inputs, *reads):
            self.made[source] = self.graph.placeholder(source.name)
        self._rows = rows
        for node in program.graph.nodes:
            if node in needed and node not in self.made:
                self.made[node] = self._copy(node)
        makes = [
            n
            for n, tensor in tensors.items()
            if self.start <= tensor.producer < self.stop and tensor.consumers[-1] >= self.stop
        ]
        outputs: list[Any] = []
        if last:
            outputs = [self.made[v] if isinstance(v, fx.Node) else v for v in program.outputs]
        self.graph.output((tuple(self.made[n] for n in makes), tuple(outputs)))
        self.graph.lint()
        module = fx.GraphModule(self._attach(), self.graph)
        return StageProgram(
            module=module,
            reads_inputs=tuple(n.name for n in reads_inputs),
            reads=tuple(tensors[n] for n in reads),
            makes=tuple(tensors[n] for n in makes),
            has_results=last,
            is_random=any(is_random(n) for n in nodes),
            writes_buffers=program.writes_buffers(self.start, self.stop),
            parameter_order=self._parameter_order(),
        )

    def _parameter_order(self) -> tuple[str, ...]:
        place = {node: number for number, node in enumerate(self.graph.nodes)}
        own = [node for node in self.graph.nodes if node.op == "get_attr"]
        own.sort(key=lambda node: min((place[user] for user in node.users), default=0))
        return tuple(dict.fromkeys(str(node.target) for node in own))

    def _closure(self, wanted: list[fx.Node]) -> set[fx.Node]:
        """What the stage needs: its own nodes, values recomputed here, parameters, inputs."""
        needed: set[fx.Node] = set()
        waiting = list(wanted)
        while waiting:
            node = waiting.pop()
            if node in needed:
                continue
            needed.add(node)
            outside = node in self.program.layer_of and not (
                self.start <= self.program.layer_of[node] < self.stop
            )
            if not outside and self.program.row_count(node) is None:
                waiting += node.all_input_nodes
        return needed

    def _copy(self, node: fx.Node) -> fx.Node:
        rows = self.program.row_count(node) if is_call(node) else None
        if rows is not None:
            return self._number(rows)
        if node.op == "get_attr":
            return self.graph.get_attr(self.names.get(str(node.target), str(node.target)))
        return self.graph.node_copy(node, lambda argument: self.made[argument])

    def _number(self, expression: sympy.Expr) -> fx.Node:
        """A size as a function of the rows that the stage is called with."""
        if expression == self.program.batch_symbol:
            return self._rows
        plain = expression.subs(self.program.batch_symbol, sympy.Symbol(ROWS, integer=True))
        return self.graph.call_function(size_for, (self._rows, str(plain)))

    def _attach(self) -> nn.Module:
        root = nn.Module()
        for node in self.made:
            if node.op != "get_attr":
                continue
            path = str(node.target)
            value = attribute(self.program.module, path)
            *parents, leaf = self.names.get(path, path).split(".")
            holder = root
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
        return root
