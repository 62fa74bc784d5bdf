"""Backwards that a capture would lose without a word, found while the model is exported."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as checkpointing

from dapple.errors import CaptureError

LOST_SAVINGS = "memory is not saved"


@contextmanager
def savings_noted(model: nn.Module) -> Iterator[list[str]]:
    """Notice regions that save activations apart or not at all, such as checkpoint(f, x).

    `torch.export` keeps their operators, so that numbers are right, and forgets the saving.

    Args:
        model: the model whose forward runs inside.

    Yields:
        A list that gets one note for all such regions, at the end.
    """
    notes: list[str] = []
    where: dict[tuple[str, str], None] = {}
    original = saved_tensors_hooks.__enter__

    def enter(hooks: saved_tensors_hooks) -> None:
        plain = type(hooks).__module__ == checkpointing.__name__
        where["checkpoint" if plain else type(hooks).__name__, _caller(model)] = None
        original(hooks)

    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield notes
    finally:
        saved_tensors_hooks.__enter__ = original  # type: ignore[method-assign]
    if where:
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in where))
        first, *others = dict.fromkeys(place for _, place in where)
        more = f" and {len(others)} more" if others else ""
        notes.append(
            f"{LOST_SAVINGS} by {kinds} in {first}{more}: torch.export keeps the operators only, and "
            "stages keep their activations; have the plan recompute layers instead "
            "(`dapple plan --recompute`)"
        )


def _caller(model: nn.Module) -> str:
    """The module of the model whose forward is running."""
    names = {id(module): name for name, module in model.named_modules()}
    frame = inspect.currentframe()
    while frame is not None:
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return f'module "{name}"' if name else "the model's own forward"
        frame = frame.f_back
    return "the forward"


@contextmanager
def own_backwards_refused(model: nn.Module) -> Iterator[None]:
    """Raise where a forward calls an `autograd.Function`, or hooks into its backward.

    `torch.export` records what the forward computes and forgets such backwards: the gradients of
    the capture would be other ones, or none.

    Args:
        model: the model whose forward runs inside.

    Raises:
        CaptureError: names the function or the hook.
    """
    original = Function.__dict__["apply"]

    def apply(kind: type[Function], *arguments: Any, **keywords: Any) -> Any:
        if kind is checkpointing.CheckpointFunction:
            raise CaptureError(
                f"the forward calls checkpoint(use_reentrant=True) in {_caller(model)}, whose "
                "gradients torch.export loses; call it with use_reentrant=False"
            )
        if not kind.__module__.startswith("torch."):
            raise CaptureError(
                f"the forward calls {kind.__qualname__}, an autograd.Function, whose backward "
                "torch.export loses; write it with operators that autograd knows"
            )
        return original.__get__(None, kind)(*arguments, **keywords)

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        raise CaptureError(
            "the forward calls Tensor.register_hook, whose effect on the backward torch.export "
            "loses; hook into parameters instead, or change the gradient with operators"
        )

    kept = torch.Tensor.register_hook
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = kept  # type: ignore[method-assign]
        Function.apply = original  # type: ignore[method-assign]


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise if a module has backward hooks, which a capture would drop.

    Raises:
        CaptureError: names the module.
    """
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f'module "{name}" has a backward hook, which torch.export loses; remove it, or hook '
                "into its parameters"
            )
