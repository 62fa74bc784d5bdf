"""A captured model: layers in order, and stages cut out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dapple.errors import CaptureError, InputError
from dapple.graph.certain import certain_gradients
from dapple.graph.dtypes import dtypes_under
from dapple.graph.lengths import DimNames, lengths_of
from dapple.graph.nodes import attribute
from dapple.graph.program import BoundaryTensor, Program
from dapple.graph.results import OutputSpec, output_specs
from dapple.graph.stage import StageProgram, build_stage
from dapple.graph.valueless import InputKind

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class InputSpec:
    """One tensor (or constant) that the model takes.

    Attributes:
        name: its name in the graph.
        shape: its shape at capture; the first dimension is the batch where `batched`.
        dtype: its type; None for a constant.
        batched: the first dimension is the batch.
        constant: the value, where it is no tensor.
        lengths: dimensions that change from step to step, with their names.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    batched: bool
    constant: Any = None
    lengths: DimNames = ()


class Elsewhere(nn.Parameter):
    """Stands in the model for a parameter that another rank holds; any use of it is an error.

    A loss that reads the model's parameters would otherwise compute with what happens to be here.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow a look at attributes, and nothing else.

        Raises:
            InputError: always, for an operation.
        """
        if getattr(func, "__name__", "") in ("__get__", "__repr__", "__format__"):
            return super().__torch_function__(  # type: ignore[no-untyped-call]
                func, types, args, kwargs or {}
            )
        raise InputError(
            "a parameter of another stage was used outside of its layers, as by a loss that reads "
            "model.parameters(); a rank holds its own stage only: compute penalties inside the "
            "model, or by the optimizer's weight_decay"
        )


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
        fingerprint: identifies the layers, parameters and tensors; the weights don't count.
        notes: what a user should know of this capture.
    """

    name: str
    layer_names: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    loss: LossFunction | None
    tied: tuple[tuple[tuple[int, str], ...], ...]
    unused_parameters: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...]
    _model: nn.Module = field(repr=False)
    _training: Program = field(repr=False)
    _evaluation: Program | None = field(repr=False)
    _input_spec: pytree.TreeSpec = field(repr=False)
    _output_specs: Mapping[bool, pytree.TreeSpec] = field(repr=False)
    _names: Mapping[str, str] = field(repr=False)
    _released: list[bool] = field(default_factory=list, repr=False)

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

    def dtypes_under(
        self,
        context: AbstractContextManager[Any],
        device: torch.device,
        training: bool = True,
    ) -> dict[str, torch.dtype]:
        """The types of the model's tensors by name, when it runs on a device within a context."""
        return dtypes_under(self._program(training), self._input_kinds(), context, device)

    def certain_gradients(self) -> frozenset[tuple[str, int]]:
        """(tensor, layer that reads it), of all that every loss gives a gradient in training."""

        def starts(results: Sequence[Any]) -> Any:
            return results if self.loss is not None else own_loss(self.unflatten_outputs(results))

        return certain_gradients(self._training, self._input_kinds(), starts)

    def stage(
        self,
        start: int,
        stop: int,
        training: bool = True,
        recompute: Sequence[tuple[int, int]] = (),
    ) -> StageProgram:
        """Layers start..stop as a module that shares the model's parameters.

        Args:
            start, stop: the layers, a half-open range.
            training: of the training mode, else of the evaluation mode.
            recompute: half-open layer ranges within, ascending, whose forward runs again in the
                backward instead of keeping its activations.

        Raises:
            CaptureError: the range is empty or outside the model.
        """
        if not 0 <= start < stop <= self.num_layers:
            raise CaptureError(
                f"layers {start}..{stop} are no stage of a model with {self.num_layers} layers"
            )
        persistent = set(self._model.state_dict(keep_vars=True))
        program = self._program(training)
        return build_stage(program, start, stop, self._names, persistent, recompute)

    def uses_batch_statistics(self, start: int, stop: int) -> bool:
        """Some layer of the range normalises over the batch (BatchNorm), in either mode."""
        programs = (self._training, self._evaluation)
        return any(p.uses_batch_statistics(start, stop) for p in programs if p is not None)

    def written_buffers(self, start: int, stop: int, by_rows: bool = False) -> tuple[str, ...]:
        """The buffers that layers of the range update in training, by the model's names.

        Args:
            start, stop: the layers, a half-open range.
            by_rows: only those whose new value depends on the rows, other than by a batch norm.
        """
        found = self._training.written_buffers(start, stop, by_rows)
        return tuple(self._names[name] for name in found)

    def opaque_batch_norm(self, start: int, stop: int) -> str | None:
        """A batch norm of the range that lies in a layer taken as it is; None if there is none."""
        layers = self._training.opaque_layers(start, stop)
        return next((layer.batch_norm for layer in layers if layer.batch_norm), None)

    def opaque_writes(self, start: int, stop: int) -> bool:
        """A layer of the range that is taken as it is writes into what it reads."""
        return any(layer.written for layer in self._training.opaque_layers(start, stop))

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
                f"the inputs have different batch sizes: {rows}; pass as many rows of each, or "
                "name what is no batch in capture's `shared`"
            )
        return named

    def rows_of_inputs(self, inputs: Any, where: slice) -> Any:
        """A row range of inputs, in the structure they came in."""
        arguments, keywords = as_call(inputs)
        flat, spec = pytree.tree_flatten((arguments, keywords))
        cut = [v[where] if s.batched else v for s, v in zip(self.inputs, flat, strict=True)]
        arguments, keywords = pytree.tree_unflatten(cut, spec)
        if isinstance(inputs, dict):
            return keywords
        return arguments if isinstance(inputs, tuple | list) else arguments[0]

    def lengths_of(self, named: Mapping[str, Any]) -> dict[str, int]:
        """What the lengths that capture was told of are in flattened inputs, by name.

        Raises:
            InputError: one name stands for two lengths.
        """
        return lengths_of([(s.name, s.lengths) for s in self.inputs], named)

    def batch_size(self, named: Mapping[str, Any]) -> int:
        """Rows of flattened inputs."""
        return next(int(named[s.name].shape[0]) for s in self.inputs if s.batched)

    def unflatten_outputs(self, flat: Sequence[Any], training: bool = True) -> Any:
        """The model's own output structure from a stage's flat results."""
        return pytree.tree_unflatten(list(flat), self._output_specs[training])

    def output_specs(self, training: bool = True) -> tuple[OutputSpec, ...]:
        """The values that the model returns, flat, in order."""
        return output_specs(self._program(training))

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

    def original_names(self) -> dict[str, list[str]]:
        """Every name of each parameter and buffer in the model's state_dict, by its first name."""
        found: dict[int, list[str]] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            found.setdefault(id(value), []).append(name)
        return {names[0]: names for names in found.values()}

    def release(self, keep: set[int]) -> None:
        """Free the memory of parameters and buffers other than those with an id in `keep`.

        Neither the model nor this capture can be used for anything else afterwards.

        Raises:
            CaptureError: that has been done before.
        """
        if self._released:
            raise CaptureError(
                f"this capture of {self.name} has a trainer already, which freed the other stages' "
                "parameters; build and capture the model again for another"
            )
        self._released.append(True)
        for value in [*self._model.parameters(), *self._model.buffers()]:
            if id(value) not in keep:
                value.data = value.data.new_empty(0)
                value.grad = None
        elsewhere: dict[int, Elsewhere] = {}
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in keep:
                    stand_in = elsewhere.setdefault(id(parameter), Elsewhere(parameter.data))
                    module._parameters[name] = stand_in

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of the model by name, tied ones once, unused ones included."""
        return dict(self._model.named_parameters())

    @cached_property
    def unread(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the state_dict that no layer reads in training.

        They stay as they were, but belong into a checkpoint.
        """
        state = self._model.state_dict(keep_vars=True)
        read = {id(attribute(self._training.module, n)) for n in self._training.attributes()}
        first = (names[0] for names in self.original_names().values())
        return {n: state[n] for n in first if id(state[n]) not in read}

    def _input_kinds(self) -> list[InputKind]:
        return [(i.shape, i.dtype) if i.dtype else i.constant for i in self.inputs]

    def _program(self, training: bool) -> Program:
        program = self._training if training else self._evaluation
        if program is None:
            raise CaptureError(
                f"{self.name} was captured without its evaluation mode; capture it with "
                "evaluation=True"
            )
        return program


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


def _check_input(spec: InputSpec, value: Any) -> None:
    if spec.dtype is None:
        # By type as well: a tensor that equals a number is no number, nor is True one.
        if type(value) is not type(spec.constant) or value != spec.constant:
            raise InputError(
                f"input {spec.name} was captured as {spec.constant!r} and is fixed; got {value!r}"
            )
        return
    if not isinstance(value, torch.Tensor) or value.dtype != spec.dtype:
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"input {spec.name} must be a tensor of {spec.dtype}; got {kind}")
    free = dict(spec.lengths) | ({0: "batch"} if spec.batched else {})
    wanted = [free.get(dim, str(size)) for dim, size in enumerate(spec.shape)]
    if value.dim() != len(spec.shape) or any(
        value.shape[dim] != size for dim, size in enumerate(spec.shape) if dim not in free
    ):
        raise InputError(
            f"input {spec.name} has shape {list(value.shape)}, but the model was captured for "
            f"[{', '.join(wanted)}]; capture it with an example of the new shape, or name what "
            "changes in capture's `lengths`"
        )
    if spec.batched and value.shape[0] < 1:
        raise InputError(f"input {spec.name} has no rows; pass a batch of at least one")
