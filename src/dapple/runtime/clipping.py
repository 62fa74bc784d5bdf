"""The norm of the whole model's gradients, and clipping by it.

Each parameter counts once, on one rank: the first replica of its stage, or the first of all ranks
that hold it where it is tied. Every rank then knows every rank's norm, and comes to the same total:

    rank 0, stage 0          |g_0|_p  ---+
    rank 1, its replica         0     ---+--> one slot per rank, added up --> |(|g_0|_p, 0, |g_2|_p)|_p
    rank 2, stage 1          |g_2|_p  ---+                                    on every rank
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from dapple.errors import InputError, RunError
from dapple.runtime.topology import Topology

_MARGIN = 1e-6  # that torch.nn.utils.clip_grad_norm_ adds to the norm before it divides by it


class Clipping:
    """Clips the gradients by the p-norm over all unique parameters of the model.

    Gives what `torch.nn.utils.clip_grad_norm_` gives on one process that holds the model.

    Args:
        parameters: this rank's trainable parameters by name.
        counted: names of those that this rank counts, see `counted_here`.
        clip_norm: the largest norm to leave alone; inf only measures.
        norm_type: p > 0, or inf for the largest absolute value.
        error_if_nonfinite: raise if the norm is no finite number. Otherwise, as in torch, one NaN
            makes every gradient NaN, and an infinite norm makes finite gradients zero.

    Raises:
        InputError: clip_norm or norm_type is not positive.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        counted: frozenset[str],
        clip_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> None:
        for name, value in (("clip_norm", clip_norm), ("norm_type", norm_type)):
            if not value > 0:
                raise InputError(f"{name} is {value}; pass a number above 0, or inf")
        self._parameters = list(parameters.values())
        self._counted = [p for name, p in parameters.items() if name in counted]
        self._clip_norm = clip_norm
        self._norm_type = float(norm_type)
        self._error_if_nonfinite = error_if_nonfinite

    def local_norm(self) -> float:
        """The norm of the gradients that this rank counts."""
        gradients = [p.grad for p in self._counted if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients, self._norm_type))

    def total_norm(self, norms: torch.Tensor) -> float:
        """The norm of the whole model's gradients from that of every rank."""
        return float(torch.linalg.vector_norm(norms, self._norm_type))

    def check(self, total_norm: float) -> None:
        """Raise if it is not finite, and that is to be an error.

        Raises:
            RunError: so it is.
        """
        if self._error_if_nonfinite and not math.isfinite(total_norm):
            raise RunError(
                f"the gradients' norm of order {self._norm_type:g} is {total_norm}; look for a loss "
                "that overflows or divides by zero, or pass error_if_nonfinite=False"
            )

    def clip(self, total_norm: float) -> None:
        """Scale this rank's gradients so that the model's norm is at most `clip_norm`."""
        factor = self._clip_norm / (total_norm + _MARGIN)
        if factor >= 1.0:  # not for NaN
            return
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(factor)


def counted_here(
    topology: Topology, names: Mapping[str, object], tied_ranks: Mapping[str, tuple[int, ...]]
) -> frozenset[str]:
    """The parameters that this rank, and no other, counts for the whole model.

    Args:
        topology: this rank's place.
        names: this rank's trainable parameters.
        tied_ranks: per tied parameter of this rank the ranks of all its holders.
    """
    own = topology.ranks[topology.stage]
    return frozenset(name for name in names if tied_ranks.get(name, own)[0] == topology.rank)
