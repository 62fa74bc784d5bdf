"""The gradients of all stages of one rank, summed per stage as its last backward ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from dapple.runtime.gradients import GradientBuffers
from dapple.runtime.transport import Transport


class RankGradients:
    """Gradient buffers of each stage of a rank.

    With several stages, what more than one rank's or one stage's backward adds to (tied parameters)
    has buffers of its own, which are summed after the rank's last backward.

    Args:
        parameters: this rank's trainable parameters by name.
        orders: per stage the names of those that it reads, in the order of first use.
        ranks: the replicas of this rank's stages.
        tied: for each tied parameter of this rank the ranks of all its holders, in the same order
            on every holder.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        orders: Mapping[int, Sequence[str]],
        ranks: tuple[int, ...],
        tied: Mapping[str, tuple[int, ...]],
    ) -> None:
        readers = Counter(name for order in orders.values() for name in order)
        late = {n: tied.get(n, ranks) for n in [*tied, *(n for n in readers if readers[n] > 1)]}
        if len(orders) == 1:
            late = dict(tied)
        self._of_stage = {
            stage: GradientBuffers(
                {n: parameters[n] for n in order if len(orders) == 1 or n not in late},
                ranks,
                late if len(orders) == 1 else {},
            )
            for stage, order in orders.items()
        }
        self._late = None
        if len(orders) > 1 and late:
            self._late = GradientBuffers({n: parameters[n] for n in late}, ranks, late)

    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers."""
        return [buffer for part in self._parts() for buffer in part.buffers()]

    def attach(self) -> None:
        """Go on with the sums of the call before."""
        for part in self._parts():
            part.attach()

    def zero(self) -> None:
        """Start new sums."""
        for part in self._parts():
            part.zero()

    @contextmanager
    def summing(self, transport: Transport, stage: int, is_last: bool) -> Iterator[None]:
        """Around the last backward of a stage before the update.

        Args:
            transport: the network.
            stage: the stage.
            is_last: no other stage of this rank has a backward to come.
        """
        with ExitStack() as stack:
            if is_last and self._late is not None:
                stack.enter_context(self._late.summing(transport))
            stack.enter_context(self._of_stage[stage].summing(transport))
            yield

    def wait(self) -> None:
        """Wait for all sums. A parameter that got no gradient on any rank has none then."""
        for part in self._parts():
            part.wait()

    def _parts(self) -> list[GradientBuffers]:
        return [*self._of_stage.values(), *([] if self._late is None else [self._late])]
