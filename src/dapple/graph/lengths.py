"""Dimensions besides the batch that change from step to step, such as the length of a sequence.

Each has a name. Numbers computed from it are expressions in that name, and a piece of a batch brings
its value along with its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from dapple.errors import CaptureError, InputError

ROWS = "rows"
_PREFIX = "length_"  # keeps names such as N and S apart from what sympy calls so

Lengths = Mapping[int | str, Mapping[int, str]]
DimNames = tuple[tuple[int, str], ...]


class Rows(int):
    """A number of rows, with the lengths of the batch that they are of.

    Attributes:
        lengths: by name.
    """

    lengths: Mapping[str, int]

    def __new__(cls, rows: int, lengths: Mapping[str, int]) -> Rows:
        """Rows of a batch with such lengths."""
        made = super().__new__(cls, rows)
        made.lengths = lengths
        return made


def size_for(rows: int, expression: str) -> int:
    """A size that depends on the batch, such as "64*rows".

    >>> size_for(3, "64*rows")
    192
    >>> size_for(Rows(3, {"words": 5}), "length_words*rows")
    15
    """
    lengths = rows.lengths if isinstance(rows, Rows) else {}
    names = (ROWS, *(_PREFIX + name for name in lengths))
    return int(_compiled(expression, names)(rows, *lengths.values()))


@functools.cache
def _compiled(expression: str, names: tuple[str, ...]) -> Callable[..., float]:
    symbols = [sympy.Symbol(name) for name in names]
    function: Callable[..., float] = sympy.lambdify(
        symbols, sympy.sympify(expression), modules="math"
    )
    return function


def symbol_of(name: str) -> sympy.Symbol:
    """What stands for a length in expressions."""
    return sympy.Symbol(_PREFIX + name, integer=True)


def dims_of_inputs(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any], lengths: Lengths
) -> list[DimNames]:
    """For each flat input the dimensions that have a name.

    Args:
        arguments, keywords: of the example.
        lengths: position or name of an argument -> dimension -> name.

    Raises:
        CaptureError: no such argument or dimension, or no name.
    """
    known = [*range(len(arguments)), *keywords]
    for key, dims in lengths.items():
        if key not in known:
            raise CaptureError(f"lengths names {key!r}, but the arguments are {known}")
        for dim, name in dims.items():
            if dim < 1 or not name.isidentifier():
                raise CaptureError(
                    f"lengths gives dimension {dim} of {key!r} the name {name!r}; name dimensions "
                    'from 1, the first is the batch, by words such as "length"'
                )
    found = []
    given: list[tuple[int | str, Any]] = [*enumerate(arguments), *keywords.items()]
    for key, value in given:
        named = lengths.get(key, {})
        for leaf in pytree.tree_leaves(value):
            most = leaf.dim() if isinstance(leaf, torch.Tensor) else 0
            found.append(tuple((dim, name) for dim, name in named.items() if dim < most))
            if named and len(found[-1]) < len(named):
                raise CaptureError(
                    f"lengths names dimensions {list(named)} of {key!r}, which has {most}"
                )
    return found


def length_symbols(
    placeholders: Sequence[fx.Node], dims: Sequence[DimNames]
) -> dict[sympy.Symbol, str]:
    """Which symbol of an export stands for which length.

    Raises:
        CaptureError: the model takes one length only.
    """
    found: dict[sympy.Symbol, str] = {}
    for node, named in zip(placeholders, dims, strict=True):
        for dim, name in named:
            size = node.meta["val"].shape[dim]
            expression = size.node.expr if isinstance(size, torch.SymInt) else None
            if not isinstance(expression, sympy.Symbol):
                raise CaptureError(
                    f'the model takes one "{name}" only ({size}, dimension {dim} of {node.name}); '
                    "leave it out of lengths"
                )
            found[expression] = name
    return found


def length_refused(error: Exception, dims: Sequence[DimNames]) -> str | None:
    """What an export's failure says of lengths, in words; None: it has nothing to do with them."""
    lines = [line.strip(" -") for line in str(error).splitlines()]
    fixed = [line for line in lines if "specialized it to be a constant" in line]
    if not any(dims) or not fixed:
        return None
    names = ", ".join(sorted({name for named in dims for _, name in named}))
    return f"the model takes one length only where lengths names {names}: {fixed[0]}; leave it out"


def lengths_of(inputs: Sequence[tuple[str, DimNames]], values: Mapping[str, Any]) -> dict[str, int]:
    """The lengths of a batch.

    Args:
        inputs: name and named dimensions of each input.
        values: the inputs by name.

    Raises:
        InputError: one name stands for two lengths.
    """
    found: dict[str, int] = {}
    for source, named in inputs:
        for dim, name in named:
            size = int(values[source].shape[dim])
            if found.setdefault(name, size) != size:
                raise InputError(
                    f'"{name}" is {size} in dimension {dim} of input {source}, and {found[name]} in '
                    "another input; pass inputs of one length"
                )
    return found
