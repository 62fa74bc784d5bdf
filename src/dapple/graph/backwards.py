"""Backwards that a capture would lose without a word, found while the model is exported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from dapple.errors import CaptureError


@contextmanager
def own_backwards_refused() -> Iterator[None]:
    """Raise where a forward calls an `autograd.Function`, or hooks into its backward.

    `torch.export` records what the forward computes and forgets such backwards: the gradients of
    the capture would be other ones, or none.

    Raises:
        CaptureError: names the function or the hook.
    """
    original = Function.__dict__["apply"]

    def apply(kind: type[Function], *arguments: Any, **keywords: Any) -> Any:
        if kind is CheckpointFunction:
            raise CaptureError(
                "the forward calls checkpoint(use_reentrant=True), whose gradients torch.export "
                "loses; call it with use_reentrant=False"
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
