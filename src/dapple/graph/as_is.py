"""Layers taken as they are, where `torch.export` can't look into them: children of an `nn.Sequential`.

Each child becomes one node of a graph, called with what its predecessor returns. Parameters and buffers
are handed along, so that everything else sees who reads what:

    getitem = run_layer(layer 0, x, 0.weight, 0.bias)[0]
    getitem_1 = run_layer(layer 1, getitem, 1.weight)[0]

What the shapes and the code of a layer would tell is found by running it on the example batch, and on one
row more: which dimension holds the rows, what it writes into, whether it draws random numbers.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from dapple.errors import CaptureError, InputError
from dapple.graph.nodes import OPAQUE, Opaque
from dapple.graph.program import Program
from dapple.graph.units import Units

AS_IS = "layers are taken as they are"
_CONSTANTS = (int, float, bool, str, type(None))


class Layer:
    """A layer and how it is called; a plain object, so that a stage does not count its state twice.

    Args:
        name: its name in the model.
        module: the layer.
        given: the structure of its one argument.

    Attributes:
        returned: the structure of what it returned at capture.
        constants: what it returned there that is no tensor, by position.
    """

    def __init__(self, name: str, module: nn.Module, given: pytree.TreeSpec) -> None:
        self.name = name
        self.module = module
        self.given = given
        self.returned: pytree.TreeSpec | None = None
        self.constants: dict[int, Any] = {}
        self._modes = [part.training for part in module.modules()]

    def run(self, values: Sequence[Any]) -> tuple[list[Any], pytree.TreeSpec]:
        """Flat values of what the layer returns, and their structure."""
        for part, mode in zip(self.module.modules(), self._modes, strict=True):
            part.training = mode
        return pytree.tree_flatten(self.module(pytree.tree_unflatten(list(values), self.given)))


def run_layer(layer: Layer, *values: Any) -> tuple[Any, ...]:
    """Stands in a graph for a layer; of the values only the first are the layer's, then its state.

    Raises:
        InputError: the layer returns another structure, or another constant, than at capture.
    """
    flat, spec = layer.run(values[: layer.given.num_leaves])
    changed = {
        i: flat[i] for i, v in layer.constants.items() if spec == layer.returned and flat[i] != v
    }
    if spec != layer.returned or changed:
        raise InputError(
            f"layer {layer.name} returned something else than at capture: {changed or spec}; layers "
            "that are taken as they are must return tensors in one structure"
        )
    return tuple(flat)


class _Children(Units):
    """Every child is a unit."""

    def _find(self, path: str) -> str:
        return path


@dataclass
class _Ran:
    """What one run of a layer showed."""

    flat: list[Any]
    spec: pytree.TreeSpec
    written: list[int]
    aliased: int | None
    is_random: bool


def programs_as_is(
    model: nn.Sequential, arguments: tuple[Any, ...], batched: Sequence[bool]
) -> dict[bool, tuple[Program, pytree.TreeSpec]]:
    """The programs of training (True) and evaluation mode, layer by layer, and their outputs' structure.

    Args:
        model: the layers; left as it was.
        arguments: its one argument, an example.
        batched: which of the argument's flat values have rows.

    Raises:
        CaptureError: there are several arguments, or what a layer returns or does can't be followed.
    """
    if len(arguments) != 1:
        raise CaptureError(
            f"a list of layers takes one argument, not {len(arguments)}; pass a tuple of tensors as one"
        )
    random = torch.get_rng_state()
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        return {
            training: _Tracer(model if training else model.eval(), arguments[0], batched).program()
            for training in (True, False)
        }
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


class _Tracer:
    """Builds the graph of one mode."""

    def __init__(self, model: nn.Sequential, argument: Any, batched: Sequence[bool]) -> None:
        self._model = model
        self._flat, self._spec = pytree.tree_flatten(argument)
        self._batched = batched
        self._rows = next(v.shape[0] for v, b in zip(self._flat, batched, strict=True) if b)
        self._fake = FakeTensorMode(shape_env=ShapeEnv())
        self._graph = fx.Graph()
        self._root: dict[str, Any] = {}
        self._state: dict[str, fx.Node] = {}
        self._size: Any = None

    def program(self) -> tuple[Program, pytree.TreeSpec]:
        nodes: list[Any] = []
        for number, (value, has_rows) in enumerate(zip(self._flat, self._batched, strict=True)):
            node = self._graph.placeholder("input" if len(self._flat) == 1 else f"input_{number}")
            node.meta["val"] = self._input(value, has_rows)
            nodes.append(node)
        # The first layer may write into what it is given.
        values = [v.clone() if isinstance(v, torch.Tensor) else v for v in self._flat]
        spec = self._spec
        wider = [_one_row_more(v) if b else v for v, b in zip(values, self._batched, strict=True)]
        for number, (name, module) in enumerate(self._model._modules.items()):
            assert module is not None
            layer = Layer(name, module, spec)
            ran, other = _run(layer, values), _run(layer, wider)
            layer.returned = ran.spec
            nodes = self._call(number, layer, nodes, ran, other)
            values, wider, spec = ran.flat, other.flat, ran.spec
        self._graph.output(tuple(nodes))
        root = fx.GraphModule(self._root, self._graph)
        symbol = self._size.node.expr
        return Program(root, _Children(self._model), symbol), spec

    def _call(
        self, number: int, layer: Layer, given: list[Any], ran: _Ran, other: _Ran
    ) -> list[Any]:
        """The nodes of a layer: its call, and one for each tensor that it returns."""
        held = self._attribute(f"layer_as_it_is_{number}", layer)
        prefix = f"{layer.name}."
        named = [*layer.module.named_parameters(), *layer.module.named_buffers()]
        state = [self._attribute(prefix + name, value) for name, value in named]
        call = self._graph.call_function(run_layer, (held, *given, *state))
        norms = [
            prefix + name if name else layer.name
            for name, part in layer.module.named_modules()
            if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        ]
        call.meta["val"] = ()
        call.meta["nn_module_stack"] = {layer.name: (layer.name, type(layer.module))}
        call.meta[OPAQUE] = Opaque(
            tuple(1 + i for i in ran.written),
            None if ran.aliased is None else 1 + ran.aliased,
            ran.is_random,
            norms[0] if norms else None,
        )
        made: list[Any] = []
        for place, (value, wide) in enumerate(zip(ran.flat, other.flat, strict=True)):
            if isinstance(value, torch.Tensor):
                node = self._graph.call_function(operator.getitem, (call, place))
                node.meta["val"] = self._like(layer, value, wide)
                node.meta["nn_module_stack"] = call.meta["nn_module_stack"]
                made.append(node)
            else:
                layer.constants[place] = _constant(layer, value, wide)
                made.append(value)
        return made

    def _attribute(self, name: str, value: Any) -> fx.Node:
        if name not in self._state:
            self._root[name] = value
            self._state[name] = self._graph.get_attr(name)
        return self._state[name]

    def _input(self, value: Any, has_rows: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = [
            DimDynamic.DYNAMIC if has_rows and d == 0 else DimDynamic.STATIC
            for d in range(value.dim())
        ]
        if has_rows and self._size is not None:
            return self._empty((self._size, *value.shape[1:]), value)
        found = self._fake.from_tensor(
            value.detach(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
        )
        if has_rows:
            self._size = found.shape[0]
        return found

    def _like(self, layer: Layer, value: torch.Tensor, wider: torch.Tensor) -> torch.Tensor:
        """A tensor without values whose shape says how it depends on the rows."""
        shape: list[Any] = []
        for size, other in zip(value.shape, wider.shape, strict=True):
            each, rest = divmod(size, self._rows)
            if size == other:
                shape.append(size)
            elif rest == 0 and other == each * (self._rows + 1):
                shape.append(each * self._size if each > 1 else self._size)
            else:
                raise CaptureError(
                    f"layer {layer.name} returns {list(value.shape)} for {self._rows} rows and "
                    f"{list(wider.shape)} for one more; sizes must be fixed or grow with the rows"
                )
        return self._empty(shape, value)

    def _empty(self, shape: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
        with self._fake:
            return torch.empty(shape, dtype=like.dtype, device=like.device)


def _run(layer: Layer, values: Sequence[Any]) -> _Ran:
    """Run a layer and see what it does."""
    state = dict([*layer.module.named_parameters(), *layer.module.named_buffers()])
    watched = [*values, *state.values()]
    before = [(v._version, v.clone()) for v in watched if isinstance(v, torch.Tensor)]
    random = torch.get_rng_state()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flat, spec = layer.run(values)
    except Exception as error:
        raise CaptureError(
            f"layer {layer.name} fails on the example batch: {type(error).__name__}: {error}"
        ) from error
    if any(v is not state[n] for n, v in layer.module.named_buffers()):
        raise CaptureError(
            f"layer {layer.name} replaces a buffer by another tensor in its forward; write into it"
        )
    tensors = [i for i, v in enumerate(watched) if isinstance(v, torch.Tensor)]
    return _Ran(
        flat,
        spec,
        # Batch norm writes without counting up the version; some write what was there already.
        [
            i
            for i, (version, value) in zip(tensors, before, strict=True)
            if watched[i]._version != version or not watched[i].equal(value)
        ],
        _aliased(values, flat),
        not torch.equal(torch.get_rng_state(), random),
    )


def _aliased(values: Sequence[Any], flat: Sequence[Any]) -> int | None:
    """Which of the values shares memory with what was returned."""
    made = {_storage(v) for v in flat if isinstance(v, torch.Tensor)}
    given = (i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and _storage(v) in made)
    return next(given, None)


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _one_row_more(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value, value[:1]]).detach()


def _constant(layer: Layer, value: Any, other: Any) -> Any:
    if not isinstance(value, _CONSTANTS) or value != other:
        raise CaptureError(
            f"layer {layer.name} returns {type(value).__name__} {value!r}, which is no tensor and no "
            "constant; return tensors, or the same number for any batch"
        )
    return value
