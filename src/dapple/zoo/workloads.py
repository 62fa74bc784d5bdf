"""The zoo's models as workloads, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dapple.errors import InputError
from dapple.workload import Workload
from dapple.zoo.benchmarks import BENCHMARKS
from dapple.zoo.examples import integers, normal
from dapple.zoo.gpt import GPT, next_byte_loss, unmasked_tokens
from dapple.zoo.mlp import MLP, mean_squared_error
from dapple.zoo.skip import SkipNet


def gpt_workload(
    vocab: int = 256,
    width: int = 256,
    layers: int = 10,
    heads: int = 8,
    context: int = 128,
    dropout: float = 0.0,
) -> Workload:
    """A byte-level GPT: tokens [B, context], weighted by unmasked tokens. Arguments as `GPT`."""
    return Workload(
        name="gpt",
        model=GPT(vocab, width, layers, heads, context, dropout),
        inputs=lambda rows: (integers(0, vocab, (rows, context), salt=0),),
        targets=lambda rows: integers(0, vocab, (rows, context), salt=1),
        loss=next_byte_loss,
        weight=unmasked_tokens,
    )


def mlp_workload(inputs: int = 32, width: int = 64, outputs: int = 16, hidden: int = 5) -> Workload:
    """A perceptron: rows [B, inputs] of the model's dtype, squared error. Arguments as `MLP`."""
    model = MLP(inputs, width, outputs, hidden)
    return Workload(
        name="mlp",
        model=model,
        inputs=lambda rows: (normal(model, (rows, inputs), salt=0),),
        targets=lambda rows: normal(model, (rows, outputs), salt=1),
        loss=mean_squared_error,
    )


def skipnet_workload(width: int = 32, layers: int = 6, outputs: int = 8) -> Workload:
    """The net with a skip: rows [B, width] and lengths [B]. Arguments as `SkipNet`."""
    model = SkipNet(width, layers, outputs)
    return Workload(
        name="skipnet",
        model=model,
        inputs=lambda rows: (
            normal(model, (rows, width), salt=0),
            integers(1, width + 1, (rows,), salt=2),
        ),
        targets=lambda rows: normal(model, (rows, outputs), salt=1),
        loss=mean_squared_error,
    )


ZOO: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {"gpt": gpt_workload, "mlp": mlp_workload, "skipnet": skipnet_workload, **BENCHMARKS}
)
"""Name -> factory of a workload."""


def make_workload(name: str, **arguments: Any) -> Workload:
    """Build a workload of the zoo from what a user typed.

    >>> make_workload("mlp", width=8).name
    'mlp'

    Args:
        name: a key of `ZOO`.
        arguments: passed to its factory.

    Raises:
        InputError: no such name, no such argument, or a value that the model refuses.
    """
    if name not in ZOO:
        raise InputError(f'model "{name}" is not in the zoo; known: {", ".join(ZOO)}')
    known = inspect.signature(ZOO[name]).parameters
    if unknown := [key for key in arguments if key not in known]:
        raise InputError(
            f'model "{name}" has no argument "{unknown[0]}"; it has: {", ".join(known)}'
        )
    try:
        return ZOO[name](**arguments)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise InputError(
            f'model "{name}" cannot be built with {arguments}: {str(error).splitlines()[0]}'
        ) from error
