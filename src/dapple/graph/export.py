"""The programs of a model's two modes: by `torch.export`, or layer by layer as it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
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
from dapple.graph.backwards import own_backwards_refused, savings_noted
from dapple.graph.failures import export_failure, export_output_kept
from dapple.graph.lengths import DimNames, length_refused, length_symbols
from dapple.graph.normalise import normalise
from dapple.graph.outputs import objects_left_out
from dapple.graph.program import Program
from dapple.graph.units import Units

_MAX_BATCH = 1 << 20


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Leave each module in the mode that it was found in."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True)
class Found:
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


def exported(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    batched: Sequence[bool],
    dims: Sequence[DimNames],
    finer: bool,
    evaluation: bool,
) -> Found:
    """The programs of a model, by `torch.export`.

    Args:
        model: the model; left as it was.
        arguments: positional arguments, an example.
        keywords: keyword arguments, an example.
        batched: which of the flat arguments have rows.
        dims: which dimensions of each change besides the batch.
        finer: units are leaf modules.
        evaluation: the evaluation mode, too.

    Raises:
        CaptureError: export failed, or would lose gradients.
    """
    units = Units(model, finer)
    programs: dict[bool, Program] = {}
    specs: dict[bool, pytree.TreeSpec] = {}
    with modes_kept(model), objects_left_out(model) as left_out:
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
    return Found(programs, specs, programs[True], [*left_out, *savings])


def taken_as_is(
    model: nn.Sequential,
    arguments: tuple[Any, ...],
    batched: Sequence[bool],
    evaluation: bool,
    reason: str,
) -> Found:
    """The programs of a list of layers as they are.

    Args:
        model: the layers; its mode is changed.
        arguments: positional arguments, an example.
        batched: which of the flat arguments have rows.
        evaluation: the evaluation mode, too.
        reason: why export did not take it, for the note.

    Raises:
        CaptureError: what a layer returns or does can't be followed.
    """
    if not model.training:
        model.train()
    both = programs_as_is(model, arguments, batched)
    note = f"{AS_IS}, since {reason}"
    kept = {mode: found for mode, found in both.items() if mode or evaluation}
    programs = {mode: program for mode, (program, _) in kept.items()}
    specs = {mode: spec for mode, (_, spec) in kept.items()}
    # In evaluation mode neither dropout nor batch norm is in the way.
    return Found(programs, specs, both[False][0], [note])


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
