"""Capture: from an unmodified `nn.Module` to a graph of layers that can be cut anywhere.

model --torch.export, train mode--> Program (training)   --build_stage--> stage modules
      --torch.export, eval mode --> Program (evaluation) --build_stage--> stage modules
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dapple.errors import CaptureError
from dapple.graph.as_is import AS_IS
from dapple.graph.backwards import (
    LOST_SAVINGS,
    refuse_backward_hooks,
)
from dapple.graph.export import exported, modes_kept, taken_as_is
from dapple.graph.layers import InputSpec, LayerGraph, LossFunction, as_call, own_loss
from dapple.graph.lengths import DimNames, Lengths, dims_of_inputs
from dapple.graph.nodes import attribute
from dapple.graph.outputs import VALUES
from dapple.graph.probe import MIXING, rows_that_mix
from dapple.graph.program import Program
from dapple.graph.wrappers import refuse_wrappers


class CaptureWarning(UserWarning):
    """What capture warns of; it is in the notes as well."""


def is_warning(note: str) -> bool:
    """Whether a note is about something that may surprise, and not only for the record."""
    return note.startswith((MIXING, LOST_SAVINGS, AS_IS))


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
        CaptureWarning: some row's values depend on other rows, so that pieces of a batch give other
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
    refuse_wrappers(model)
    refuse_backward_hooks(model)
    arguments, keywords = as_call(inputs)
    _check_kinds(arguments, keywords)
    flat, input_spec = pytree.tree_flatten((arguments, keywords))
    rows = _example_rows(flat)
    batched = _batched(arguments, keywords, rows, shared)
    dims = dims_of_inputs(arguments, keywords, lengths or {})
    with modes_kept(model):
        try:
            found = exported(model, arguments, keywords, batched, dims, finer, evaluation)
        except CaptureError as error:
            if any(dims):
                raise  # layers that are taken as they are have one length
            if not isinstance(model, nn.Sequential):
                raise CaptureError(
                    f"{error}; or hand over a list of layers, which are taken as they are"
                ) from error
            found = taken_as_is(model, arguments, batched, evaluation, str(error))
        training = found.programs[True]
        programs = list(found.programs.values())
        notes = [*found.notes, *_align(programs)]
        notes += rows_that_mix(found.probed, flat, batched)
    names = _first_names(model, *programs)
    for note in notes:
        if is_warning(note):
            warnings.warn(f"{type(model).__name__}: {note}", CaptureWarning, stacklevel=2)
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


def _check_kinds(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    for key, value in [*enumerate(arguments), *keywords.items()]:
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, VALUES):
                raise CaptureError(
                    f"argument {json.dumps(key)} holds a {type(leaf).__name__}; pass tensors, numbers, "
                    "text and None, alone or in tuples, lists and dicts"
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
