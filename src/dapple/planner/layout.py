"""A plan before memory caps its warm-up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dapple.records import StagePlan

WIDE = "wide"
"""Warm-up counts of up to twice policy B's, for `tune_warmup` to lower in the end.

Where memory holds fewer, they fall evenly: stages of equal counts would take turns.
"""


@dataclass(frozen=True, order=True)
class Layout:
    """A plan before memory caps its warm-up: cuts, devices, M and the warm-up policy.

    Attributes:
        bounds: S + 1 layer numbers from 0 to N; stage s holds layers bounds[s]..bounds[s + 1].
        devices: per stage its devices.
        micro_batches: M.
        policy: warm-up policy "A" or "B" (DAPPLE, section 3), or `WIDE`.
        recompute: stages whose activations do not fit run their forwards again.
        shard: stages share out their optimizer's state among their replicas where they do not fit
            otherwise, or where that makes the update shorter.
    """

    bounds: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    micro_batches: int
    policy: str = "A"
    recompute: bool = False
    shard: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.devices)

    def stages(self, warmup: Sequence[int] | None = None) -> tuple[StagePlan, ...]:
        """The stages, with warm-up counts if given."""
        counts = warmup or [1] * self.num_stages
        return tuple(
            StagePlan(start=a, stop=b, devices=devices, warmup=k)
            for (a, b), devices, k in zip(
                itertools.pairwise(self.bounds), self.devices, counts, strict=True
            )
        )


def leaner(
    stage: StagePlan, layout: Layout, update_seconds: Callable[[StagePlan], Sequence[float]]
) -> Iterator[StagePlan]:
    """The stage, and then with what its layout allows it to save memory with.

    Args:
        stage: a stage of the layout.
        layout: says what is allowed.
        update_seconds: per replica of a stage the seconds of its update. State is shared out first
            where the longest is shorter then: nothing else of a step changes.
    """
    shards = ["none"]
    if layout.shard and stage.replicas > 1:
        both = {s: stage.model_copy(update={"shard": s}) for s in ("none", "optimizer")}
        shards = sorted(both, key=lambda s: (max(update_seconds(both[s])), s == "optimizer"))
    for again, shard in itertools.product([False, True] if layout.recompute else [False], shards):
        yield stage.model_copy(update={"recompute": again, "shard": shard})
