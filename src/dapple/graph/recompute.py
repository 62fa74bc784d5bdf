"""A range of layers whose activations are not kept: its forward runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """Layers that keep only what they are given.

    They have no parameters of their own: the stage hands them over. The second forward draws the
    same random numbers, because its layers are seeded, runs under the same autocast, and works on
    copies of what the first one wrote into, so that a buffer is updated once.

    Args:
        body: the layers; called with rows, seed, and the values that they read.
        written: positions of the arguments that they write into.

    Attributes:
        again: entered around each second forward.
    """

    def __init__(self, body: fx.GraphModule, written: Sequence[int]) -> None:
        super().__init__()
        self.body = body
        self._written = tuple(written)
        self.again: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, *values: Any) -> Any:
        """What the layers make for others, as a tuple."""
        if not torch.is_grad_enabled():
            return self.body(*values)
        written = {i: values[i] for i in self._written}
        before = {i: value.clone() for i, value in written.items()}
        fresh = True

        def run(*given: Any) -> Any:
            nonlocal fresh
            arguments = list(given)
            if fresh:
                fresh = False
                for i, value in written.items():
                    arguments[i] = value
                return self.body(*arguments)
            for i, value in before.items():
                arguments[i] = value.clone()
            with self.again():
                return self.body(*arguments)

        # autograd must not watch what is written: it would call the second forward a mistake.
        kept = [None if i in written else value for i, value in enumerate(values)]
        return checkpoint(run, *kept, use_reentrant=False, preserve_rng_state=False)
