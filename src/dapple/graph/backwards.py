"""Backwards that a capture would lose without a word, found while the model is exported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from dapple.errors import CaptureError


@contextmanager
def own_backwards_refused() -> Iterator[None]:
    """Raise where a forward calls an `autograd.Function`.

    `torch.export` records what its forward computes and forgets its backward: the gradients of the
    capture would be other ones, or none.

    Raises:
        CaptureError: names the function.
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

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]
