"""Who keeps whose optimizer state: docs/semantics.md, rule 8."""

from __future__ import annotations

from collections.abc import Sequence

from dapple.costs.model import CostModel
from dapple.records import StagePlan


def shard_owners(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
    """Which part owns each parameter, given their sizes.

    Parameters stay whole: the largest goes first, each to the part that has least so far.

    >>> shard_owners((2, 6, 3, 1), 2)
    (1, 0, 1, 1)
    """
    loads = [0] * parts
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return tuple(owners)


def state_shares(model: CostModel, stage: StagePlan) -> tuple[float, ...]:
    """Per replica of a stage the bytes of the parameters whose optimizer state it keeps.

    A parameter that other stages hold too is kept by every replica. Without the sizes of single
    parameters in the profile the others are taken to divide evenly.
    """
    whole = model.parameter_bytes(stage.start, stage.stop)
    if stage.shard == "none" or stage.replicas == 1:
        return (float(whole),) * stage.replicas
    everywhere = _spread_bytes(model, stage)
    sizes = _sizes(model, stage)
    if sizes is None:
        return (everywhere + (whole - everywhere) / stage.replicas,) * stage.replicas
    shares = [float(everywhere)] * stage.replicas
    for size, owner in zip(sizes, shard_owners(sizes, stage.replicas), strict=True):
        shares[owner] += size
    return tuple(shares)


def update_seconds(model: CostModel, stage: StagePlan) -> tuple[float, ...]:
    """Per replica of a stage the seconds of its update, with what sharing it out takes.

    A sharded update ends on all replicas together, when each has the others' parameters: that
    takes as long as half an AllReduce.
    """
    whole = model.optimizer_seconds(stage.start, stage.stop)
    alone = [whole / model.speeds[device] for device in stage.devices]
    if stage.shard == "none" or stage.replicas == 1:
        return tuple(alone)
    size = model.parameter_bytes(stage.start, stage.stop)
    parts = [
        seconds * share / size if size else seconds
        for seconds, share in zip(alone, state_shares(model, stage), strict=True)
    ]
    sent = size - _spread_bytes(model, stage)
    end = max(parts) + model.network.ring(stage.devices).seconds(sent) / 2
    return (end,) * stage.replicas


def _spread_bytes(model: CostModel, stage: StagePlan) -> int:
    """Bytes of the stage's parameters that other stages hold too."""
    total = 0
    for group in model.profile.tied:
        inside = [stage.start <= member.layer < stage.stop for member in group.members]
        if any(inside) and not all(inside):
            total += group.parameter_bytes
    return total


def _sizes(model: CostModel, stage: StagePlan) -> list[int] | None:
    """Bytes of each parameter that only this stage holds, tied ones once; None: unknown."""
    found: list[int] = []
    for layer in model.profile.layers[stage.start : stage.stop]:
        if layer.parameter_sizes is None:
            return None
        found += layer.parameter_sizes
    for group in model.profile.tied:
        inside = [stage.start <= member.layer < stage.stop for member in group.members]
        for _ in range(sum(inside) - all(inside)):
            if group.parameter_bytes in found:
                found.remove(group.parameter_bytes)
    return found
