"""Capture: from an unmodified `nn.Module` to a graph of layers that can be cut anywhere.

model --torch.export, train mode--> Program (training)   --build_stage--> stage modules
      --torch.export, eval mode --> Program (evaluation) --build_stage--> stage modules
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree

from dapple.errors import CaptureError, InputError
from dapple.graph.backwards import own_backwards_refused
from dapple.graph.failures import export_failure, export_output_kept
from dapple.graph.nodes import attribute
from dapple.graph.normalise import normalise
from dapple.graph.program import BoundaryTensor, Program
from dapple.graph.stage import StageProgram, build_stage
from dapple.graph.units import Units

LossFunction = Callable[[Any, Any], torch.Tensor]
_MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class InputSpec:
    """One tensor (or constant) that the model takes.

    Attributes:
        name: its name in the graph.
        shape: its shape at capture; the first dimension is the batch where `batched`.
        dtype: its type; None for a constant.
        batched: the first dimension is the batch.
        constant: the value, where it is no tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    batched: bool
    constant: Any = None


@dataclass(frozen=True)
class LayerGraph:
    """A captured model: layers in order, the tensors between them, who holds which parameter.

    Attributes:
        name: the model's name, for people.
        layer_names: one name per layer.
        inputs: the model's inputs, flat, in order.
        loss: computes the loss from (output, targets); None: the model returns its loss.
        tied: groups of (layer, parameter name) that read one and the same parameter.
        unused_parameters: parameters that no layer reads; they stay as they were.
        notes: what a user should know of this capture.
    """

    name: str
    layer_names: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    loss: LossFunction | None
    tied: tuple[tuple[tuple[int, str], ...], ...]
    unused_parameters: tuple[str, ...]
    notes: tuple[str, ...]
    _model: nn.Module = field(repr=False)
    _training: Program = field(repr=False)
    _evaluation: Program | None = field(repr=False)
    _input_spec: pytree.TreeSpec = field(repr=False)
    _output_specs: Mapping[bool, pytree.TreeSpec] = field(repr=False)
    _names: Mapping[str, str] = field(repr=False)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_names)

    def parameters_of(self, layer: int) -> dict[str, nn.Parameter]:
        """The parameters that a layer reads, by the model's own (first) name."""
        names = self._training.parameters_of(layer)
        return {self._names[n]: attribute(self._training.module, n) for n in names}

    def tensors(self, training: bool = True) -> tuple[BoundaryTensor, ...]:
        """The tensors that are read by a later layer than their own, in graph order."""
        return tuple(self._program(training).boundary_tensors().values())

    def stage(self, start: int, stop: int, training: bool = True) -> StageProgram:
        """Layers start..stop as a module that shares the model's parameters.

        Raises:
            CaptureError: the range is empty or outside the model.
        """
        if not 0 <= start < stop <= self.num_layers:
            raise CaptureError(
                f"layers {start}..{stop} are no stage of a model with {self.num_layers} layers"
            )
        persistent = set(self._model.state_dict(keep_vars=True))
        return build_stage(self._program(training), start, stop, self._names, persistent)

    def uses_batch_statistics(self, start: int, stop: int) -> bool:
        """Some layer of the range normalises over the batch (BatchNorm)."""
        return self._training.uses_batch_statistics(start, stop)

    def flatten_inputs(self, inputs: Any) -> dict[str, Any]:
        """The model's inputs by their names in the graph, checked against the capture.

        Args:
            inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments, as
                at capture.

        Raises:
            InputError: another structure, type or shape than at capture, or unequal batch sizes.
        """
        arguments, keywords = as_call(inputs)
        flat, spec = pytree.tree_flatten((arguments, keywords))
        if spec != self._input_spec:
            captured = [s.constant if s.dtype is None else _A_TENSOR for s in self.inputs]
            raise InputError(
                f"the inputs are ({_as_call_text(flat, spec)}), but {self.name} was captured with "
                f"({_as_call_text(captured, self._input_spec)}); pass the same arguments"
            )
        named = dict(zip((s.name for s in self.inputs), flat, strict=True))
        rows: dict[str, int] = {}
        for spec_, value in zip(self.inputs, flat, strict=True):
            _check_input(spec_, value)
            if spec_.batched:
                rows[spec_.name] = value.shape[0]
        if len(set(rows.values())) > 1:
            raise InputError(
                f"the inputs have different batch sizes: {rows}; pass as many rows of each (at "
                "capture, an input with as many rows as the first is taken for a batch)"
            )
        return named

    def batch_size(self, named: Mapping[str, Any]) -> int:
        """Rows of flattened inputs."""
        return next(int(named[s.name].shape[0]) for s in self.inputs if s.batched)

    def unflatten_outputs(self, flat: Sequence[Any], training: bool = True) -> Any:
        """The model's own output structure from a stage's flat results."""
        return pytree.tree_unflatten(list(flat), self._output_specs[training])

    def loss_of(self, output: Any, targets: Any) -> torch.Tensor:
        """The loss of one piece: by the loss function, or out of the model's own output.

        Raises:
            InputError: the loss function returns something else than a scalar.
        """
        if self.loss is None:
            return own_loss(output)
        loss = self.loss(output, targets)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise InputError(
                f"the loss function returned {shape} instead of a scalar tensor; return the mean "
                "over its rows, or over what `weight` counts"
            )
        return loss

    def loss_of_results(
        self, results: Sequence[Any], targets: Any, *, training: bool
    ) -> torch.Tensor:
        """The loss of one piece from the last stage's flat results."""
        return self.loss_of(self.unflatten_outputs(results, training), targets)

    def fingerprint(self) -> str:
        """Identifies the model's layers, parameters and tensors; the weights don't count."""
        parts: list[Any] = [self.name]
        for layer, name in enumerate(self.layer_names):
            shapes = {n: (tuple(p.shape), p.dtype) for n, p in self.parameters_of(layer).items()}
            parts.append((name, sorted(shapes.items(), key=str)))
        parts += [(t.name, t.producer, t.consumers, t.shape, t.dtype) for t in self.tensors()]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def original_names(self) -> dict[str, list[str]]:
        """Every name of each parameter and buffer in the model's state_dict, by its first name."""
        found: dict[int, list[str]] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            found.setdefault(id(value), []).append(name)
        return {names[0]: names for names in found.values()}

    def release(self, keep: set[int]) -> None:
        """Free the memory of parameters and buffers other than those with an id in `keep`.

        The model can't be used on its own afterwards.
        """
        for value in [*self._model.parameters(), *self._model.buffers()]:
            if id(value) not in keep:
                value.data = value.data.new_empty(0)
                value.grad = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of the model by name, tied ones once, unused ones included."""
        return dict(self._model.named_parameters())

    def unread(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the state_dict that no layer reads in training.

        They stay as they were, but belong into a checkpoint.
        """
        state = self._model.state_dict(keep_vars=True)
        read = {id(attribute(self._training.module, n)) for n in self._training.attributes()}
        first = (names[0] for names in self.original_names().values())
        return {n: state[n] for n in first if id(state[n]) not in read}

    def _program(self, training: bool) -> Program:
        program = self._training if training else self._evaluation
        if program is None:
            raise CaptureError(
                f"{self.name} was captured without its evaluation mode; capture it with "
                "evaluation=True"
            )
        return program


def capture(
    model: nn.Module,
    inputs: Any,
    *,
    loss: LossFunction | None = None,
    name: str | None = None,
    finer: bool = False,
    evaluation: bool = True,
) -> LayerGraph:
    """Capture a model with example inputs.

    Args:
        model: any module that `torch.export` takes; it is not modified.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments. Tensors whose first
            dimension equals the first tensor's are taken as batched; at least 2 rows.
        loss: (output, targets) -> scalar mean loss; None: the model returns its loss (a scalar, a
            dict or named tuple with "loss", or a tuple that starts with it).
        name: the model's name; its class name by default.
        finer: layers are leaf modules rather than blocks.
        evaluation: also capture the evaluation mode, which takes as long again.

    Raises:
        CaptureError: export failed, or the example has fewer than 2 rows.
    """
    arguments, keywords = as_call(inputs)
    flat, input_spec = pytree.tree_flatten((arguments, keywords))
    rows = _example_rows(flat)
    modes = {module: module.training for module in model.modules()}
    units = Units(model, finer)
    try:
        # A model in training mode is taken as it is: parts of it may be in evaluation mode for good.
        if not model.training:
            model.train()
        training, output_spec = _export(model, arguments, keywords, rows, units)
        output_specs = {True: output_spec}
        other = None
        if evaluation:
            other, output_specs[False] = _export(model.eval(), arguments, keywords, rows, units)
    finally:
        for module, mode in modes.items():
            module.training = mode
    programs = [training] if other is None else [training, other]
    notes = _align(programs)
    names = _first_names(model, *programs)
    specs = tuple(_input_spec(node.name, v, rows) for node, v in _pair(training, flat))
    graph = LayerGraph(
        name=name or type(model).__name__,
        layer_names=tuple(training.unit_names),
        inputs=specs,
        loss=loss,
        tied=_tied(training, names),
        unused_parameters=_unused(model, training, names),
        notes=tuple(notes),
        _model=model,
        _training=training,
        _evaluation=other,
        _input_spec=input_spec,
        _output_specs=output_specs,
        _names=names,
    )
    if loss is None:
        _check_own_loss(graph)
    return graph


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from a tensor, a tuple or a dict."""
    if isinstance(inputs, dict):
        return (), {name: inputs[name] for name in sorted(inputs)}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


class _ATensor:
    def __repr__(self) -> str:
        return "tensor"


_A_TENSOR = _ATensor()


def _as_call_text(flat: Sequence[Any], spec: pytree.TreeSpec) -> str:
    """Arguments as in a call, such as "tensor, mask=tensor, scale=3"."""
    shown = [_A_TENSOR if isinstance(v, torch.Tensor) else v for v in flat]
    arguments, keywords = pytree.tree_unflatten(shown, spec)
    words = [repr(a) for a in arguments] + [f"{n}={v!r}" for n, v in keywords.items()]
    return ", ".join(words)


def own_loss(output: Any) -> torch.Tensor:
    """The loss in a model's own output.

    Raises:
        CaptureError: there is none.
    """
    candidates = [output]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    elif isinstance(output, tuple | list) and output:
        candidates.append(output[0])
    candidates.append(getattr(output, "loss", None))
    for value in candidates:
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value
    raise CaptureError(
        f"the model returns a {type(output).__name__} without a scalar loss; pass a loss function "
        "to capture, or return the loss first or as `loss`"
    )


def _example_rows(flat: Sequence[Any]) -> int:
    tensors = [v for v in flat if isinstance(v, torch.Tensor) and v.dim() > 0]
    if not tensors:
        raise CaptureError("the example inputs hold no tensor with a batch dimension; pass one")
    rows = int(tensors[0].shape[0])
    if rows < 2:
        raise CaptureError(
            f"the example inputs have {rows} row; pass at least 2, since export takes a single row "
            "for a fixed size"
        )
    return rows


def _export(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    rows: int,
    units: Units,
) -> tuple[Program, pytree.TreeSpec]:
    batch = Dim("batch", min=1, max=_MAX_BATCH)

    def dynamic(value: Any) -> dict[int, Any] | None:
        batched = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows
        return {0: batch} if batched else None

    shapes = pytree.tree_map(dynamic, (arguments, keywords))
    random = torch.get_rng_state()
    try:
        with warnings.catch_warnings(), own_backwards_refused(), export_output_kept() as printed:
            warnings.simplefilter("ignore")
            exported = export(
                model,
                arguments,
                keywords or None,
                dynamic_shapes=_by_argument(model, shapes, keywords),
                strict=False,
            )
            module = exported.module(check_guards=False)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(export_failure(model, error, printed.getvalue())) from error
    finally:
        torch.set_rng_state(random)
    normalise(module)
    return Program(module, units, _batch_symbol(module, rows)), exported.call_spec.out_spec


def _by_argument(model: nn.Module, shapes: Any, keywords: dict[str, Any]) -> Any:
    positional, named = shapes
    if not keywords:
        return positional
    return named


def _batch_symbol(module: torch.fx.GraphModule, rows: int) -> sympy.Symbol | None:
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.dim():
            size = value.shape[0]
            if isinstance(size, torch.SymInt):
                symbol: sympy.Symbol = size.node.expr
                return symbol
    return None


def _align(programs: Sequence[Program]) -> list[str]:
    """Give all programs the same layers, with every boundary legal in each."""
    training, evaluation = programs[0], programs[-1]
    if training.unit_names != evaluation.unit_names:
        raise CaptureError(
            f"the model runs other modules in training ({training.unit_names}) than in evaluation "
            f"({evaluation.unit_names}); dapple needs the same layers in both"
        )
    notes: list[str] = []
    while True:
        illegal: dict[int, str] = {}
        for program in programs:
            illegal |= program.illegal_boundaries()
        if not illegal:
            return notes
        for boundary, reason in sorted(illegal.items()):
            before, after = training.unit_names[boundary - 1 : boundary + 1]
            notes.append(f"no cut between {before} and {after}: {reason}")
        for program in programs:
            program.merge(illegal)


def _first_names(model: nn.Module, *programs: Program) -> dict[str, str]:
    """The model's first name for every parameter and buffer that the graphs read."""
    first: dict[int, str] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(id(value), name)
    names = {}
    for program in programs:
        for node in program.graph.nodes:
            if node.op == "get_attr":
                path = str(node.target)
                names[path] = first.get(id(attribute(program.module, path)), path)
    return names


def _pair(program: Program, flat: Sequence[Any]) -> list[tuple[torch.fx.Node, Any]]:
    if len(program.placeholders) != len(flat):
        raise CaptureError(
            f"export kept {len(program.placeholders)} of {len(flat)} inputs; pass only tensors and "
            "constants that the model reads"
        )
    return list(zip(program.placeholders, flat, strict=True))


def _input_spec(name: str, value: Any, rows: int) -> InputSpec:
    if not isinstance(value, torch.Tensor):
        return InputSpec(name, (), None, False, value)
    batched = value.dim() > 0 and value.shape[0] == rows
    return InputSpec(name, tuple(value.shape), value.dtype, batched)


def _check_input(spec: InputSpec, value: Any) -> None:
    if spec.dtype is None:
        if value != spec.constant:
            raise InputError(
                f"input {spec.name} was captured as {spec.constant!r} and is fixed; got {value!r}"
            )
        return
    if not isinstance(value, torch.Tensor) or value.dtype != spec.dtype:
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"input {spec.name} must be a tensor of {spec.dtype}; got {kind}")
    first = 1 if spec.batched else 0
    if value.dim() != len(spec.shape) or tuple(value.shape[first:]) != spec.shape[first:]:
        wanted = ["batch" if spec.batched and i == 0 else str(n) for i, n in enumerate(spec.shape)]
        raise InputError(
            f"input {spec.name} has shape {list(value.shape)}, but the model was captured for "
            f"[{', '.join(wanted)}]; capture it with an example of the new shape"
        )
    if spec.batched and value.shape[0] < 1:
        raise InputError(f"input {spec.name} has no rows; pass a batch of at least one")


def _tied(program: Program, names: Mapping[str, str]) -> tuple[tuple[tuple[int, str], ...], ...]:
    holders: dict[str, list[tuple[int, str]]] = {}
    for layer in range(program.num_layers):
        for name in dict.fromkeys(names[n] for n in program.parameters_of(layer)):
            holders.setdefault(name, []).append((layer, name))
    return tuple(tuple(group) for group in holders.values() if len(group) > 1)


def _unused(model: nn.Module, program: Program, names: Mapping[str, str]) -> tuple[str, ...]:
    used = {names[n] for layer in range(program.num_layers) for n in program.parameters_of(layer)}
    return tuple(name for name, _ in model.named_parameters() if name not in used)


def _check_own_loss(graph: LayerGraph) -> None:
    flat = [
        v.meta.get("val") if isinstance(v, torch.fx.Node) else v for v in graph._training.outputs
    ]
    own_loss(graph.unflatten_outputs(flat))
