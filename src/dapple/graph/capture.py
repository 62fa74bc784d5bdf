"""Capture: from an unmodified `nn.Module` to a graph of layers that can be cut anywhere.

model --torch.export, train mode--> Program (training)   --build_stage--> stage modules
      --torch.export, eval mode --> Program (evaluation) --build_stage--> stage modules
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree

from dapple.errors import CaptureError
from dapple.graph.as_is import AS_IS, programs_as_is
from dapple.graph.backwards import (
    LOST_SAVINGS,
    own_backwards_refused,
    refuse_backward_hooks,
    savings_noted,
)
from dapple.graph.failures import export_failure, export_output_kept
from dapple.graph.layers import InputSpec, LayerGraph, LossFunction, as_call, own_loss
from dapple.graph.lengths import DimNames, Lengths, dims_of_inputs, length_refused, length_symbols
from dapple.graph.nodes import attribute
from dapple.graph.normalise import normalise
from dapple.graph.outputs import objects_left_out
from dapple.graph.probe import MIXING, rows_that_mix
from dapple.graph.program import Program
from dapple.graph.units import Units

_MAX_BATCH = 1 << 20


def capture(
    model: nn.Module | Sequence[nn.Module],
    inputs: Any,
    *,
    loss: LossFunction | None = None,
    name: str | None = None,
    finer: bool = False,
    evaluation: bool = True,
    shared: Collection[int | str] = (),
    lengths: Lengths | None = None,
) -> LayerGraph:
    """Capture a model with example inputs.

    Args:
        model: any module that `torch.export` takes; it is not modified. An `nn.Sequential`, or a
            list of layers, that it does not take is captured as it is: each child a layer.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments, of at least 2 rows.
            Tensors whose first dimension equals the first tensor's are taken as batched.
        loss: (output, targets) -> scalar mean loss; None: the model returns its loss (a scalar, a
            dict or named tuple with "loss", or a tuple that starts with it).
        name: the model's name; its class name by default.
        finer: layers are leaf modules rather than blocks.
        evaluation: also capture the evaluation mode, which takes as long again.
        shared: positions or names of arguments that are the same for all rows although their first
            dimension looks like the batch.
        lengths: dimensions besides the batch that change from step to step: position or name of an
            argument -> dimension -> name, such as {"tokens": {1: "length"}}. Equal names are equal
            lengths. The example's should be 2 or more.

    Warns:
        UserWarning: some row's values depend on other rows, so that pieces of a batch give other
            gradients than the whole. Or the forward saves memory in a way that capture loses.
            Or layers are taken as they are. All of it is also in `notes`.

    Raises:
        CaptureError: export failed and the model is no list of layers, the example has fewer than 2 rows, or the loss has parameters.
    """
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise CaptureError(
            f"the loss {type(loss).__name__} has parameters of its own, which nothing would train; "
            "compute the loss inside the model"
        )
    if not isinstance(model, nn.Module):
        model = nn.Sequential(*model)
    refuse_backward_hooks(model)
    arguments, keywords = as_call(inputs)
    flat, input_spec = pytree.tree_flatten((arguments, keywords))
    rows = _example_rows(flat)
    batched = _batched(arguments, keywords, rows, shared)
    dims = dims_of_inputs(arguments, keywords, lengths or {})
    with _modes_kept(model):
        try:
            found = _exported(model, arguments, keywords, batched, dims, finer, evaluation)
        except CaptureError as error:
            if any(dims):
                raise  # layers that are taken as they are have one length
            if not isinstance(model, nn.Sequential):
                raise CaptureError(
                    f"{error}; or hand over a list of layers, which are taken as they are"
                ) from error
            found = _taken_as_is(model, arguments, batched, evaluation, str(error))
        training = found.programs[True]
        programs = list(found.programs.values())
        notes = [*found.notes, *_align(programs)]
        notes += rows_that_mix(found.probed, flat, batched)
    names = _first_names(model, *programs)
    for note in notes:
        if note.startswith((MIXING, LOST_SAVINGS, AS_IS)):
            warnings.warn(f"{type(model).__name__}: {note}", stacklevel=2)
    specs = tuple(
        _input_spec(node.name, v, b, d)
        for (node, v), b, d in zip(_pair(training, flat), batched, dims, strict=True)
    )
    graph = LayerGraph(
        name=name or type(model).__name__,
        layer_names=tuple(training.unit_names),
        inputs=specs,
        loss=loss,
        tied=_tied(training, names),
        unused_parameters=_unused(model, training, names),
        fingerprint=_fingerprint(name or type(model).__name__, training, names),
        notes=tuple(notes),
        _model=model,
        _training=training,
        _evaluation=found.programs.get(False),
        _input_spec=input_spec,
        _output_specs=found.output_specs,
        _names=names,
    )
    if loss is None:
        _check_own_loss(graph)
    return graph


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    """Leave each module in the mode that it was found in."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True)
class _Found:
    """The programs of training (True) and evaluation mode, and what goes with them.

    Attributes:
        output_specs: the structure of each mode's output.
        probed: the program that shows whether rows mix.
        notes: what the user should know.
    """

    programs: dict[bool, Program]
    output_specs: dict[bool, pytree.TreeSpec]
    probed: Program
    notes: list[str]


def _exported(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    batched: Sequence[bool],
    dims: Sequence[DimNames],
    finer: bool,
    evaluation: bool,
) -> _Found:
    units = Units(model, finer)
    programs: dict[bool, Program] = {}
    specs: dict[bool, pytree.TreeSpec] = {}
    with _modes_kept(model), objects_left_out(model) as left_out:
        # A model in training mode is taken as it is: parts of it may be in evaluation mode for good.
        if not model.training:
            model.train()
        with savings_noted(model) as savings:
            programs[True], specs[True] = _export(model, arguments, keywords, batched, dims, units)
        if evaluation:
            model.eval()
            programs[False], specs[False] = _export(
                model, arguments, keywords, batched, dims, units
            )
    return _Found(programs, specs, programs[True], [*left_out, *savings])


def _taken_as_is(
    model: nn.Sequential,
    arguments: tuple[Any, ...],
    batched: Sequence[bool],
    evaluation: bool,
    reason: str,
) -> _Found:
    if not model.training:
        model.train()
    both = programs_as_is(model, arguments, batched)
    note = f"{AS_IS}, since {reason}"
    kept = {mode: found for mode, found in both.items() if mode or evaluation}
    programs = {mode: program for mode, (program, _) in kept.items()}
    specs = {mode: spec for mode, (_, spec) in kept.items()}
    # In evaluation mode neither dropout nor batch norm is in the way.
    return _Found(programs, specs, both[False][0], [note])


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


def _batched(
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    rows: int,
    shared: Collection[int | str],
) -> list[bool]:
    """For each flat input, whether its first dimension is the batch."""
    known = [*range(len(arguments)), *keywords]
    unknown = [key for key in shared if key not in known]
    if unknown:
        raise CaptureError(f"shared names {unknown[0]!r}, but the arguments are {known}")
    found = []
    for key, value in [*enumerate(arguments), *keywords.items()]:
        for leaf in pytree.tree_leaves(value):
            has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
            found.append(has_rows and key not in shared)
    return found


def _export(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    batched: Sequence[bool],
    dims: Sequence[DimNames],
    units: Units,
) -> tuple[Program, pytree.TreeSpec]:
    dim = Dim("batch", min=1, max=_MAX_BATCH)
    spec = pytree.tree_structure((arguments, keywords))
    dynamic = [
        {**({0: dim} if b else {}), **{at: Dim.DYNAMIC for at, _ in named}} or None
        for b, named in zip(batched, dims, strict=True)
    ]
    shapes = pytree.tree_unflatten(dynamic, spec)
    random = torch.get_rng_state()
    try:
        with (
            warnings.catch_warnings(),
            own_backwards_refused(model),
            export_output_kept() as printed,
        ):
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
        reason = export_failure(model, error, printed.getvalue())
        raise CaptureError(length_refused(error, dims) or reason) from error
    finally:
        torch.set_rng_state(random)
    normalise(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    symbols = length_symbols(placeholders, dims) if any(dims) else {}
    return Program(module, units, _batch_symbol(module), symbols), exported.call_spec.out_spec


def _by_argument(model: nn.Module, shapes: Any, keywords: dict[str, Any]) -> Any:
    positional, named = shapes
    if not keywords:
        return positional
    return named


def _batch_symbol(module: torch.fx.GraphModule) -> sympy.Symbol | None:
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


def _input_spec(name: str, value: Any, batched: bool, dims: DimNames) -> InputSpec:
    if not isinstance(value, torch.Tensor):
        return InputSpec(name, (), None, False, value)
    return InputSpec(name, tuple(value.shape), value.dtype, batched, lengths=dims)


def _fingerprint(name: str, program: Program, names: Mapping[str, str]) -> str:
    parts: list[Any] = [name]
    for layer, layer_name in enumerate(program.unit_names):
        found = {names[n]: attribute(program.module, n) for n in program.parameters_of(layer)}
        shapes = {n: (tuple(p.shape), p.dtype) for n, p in found.items()}
        parts.append((layer_name, sorted(shapes.items(), key=str)))
    tensors = program.boundary_tensors().values()
    parts += [(t.name, t.producer, t.consumers, t.shape, t.dtype) for t in tensors]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


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
