"""What every rank has to agree on before a step, and the loss that all know after it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from dapple.errors import InputError
from dapple.records import Plan
from dapple.runtime.batch import Batch
from dapple.runtime.freezing import Shared
from dapple.runtime.layout import Layout
from dapple.runtime.transport import Transport

_PRIME = 4_194_301
"""The largest below 2**22."""


def plan_in_words(plan: Plan) -> str:
    """What ranks compare of their plans: all that a run depends on.

    Not what a rank may have found out for itself, such as how fast its links are.
    """
    run = plan.model_dump_json(exclude={"predicted", "cluster", "notes", "explanation"})
    mark = zlib.crc32(run.encode())
    return f"one of {plan.num_stages} stages for {plan.model} ({mark:08x})"


def check_same(
    layout: Layout,
    told: Mapping[str, str],
    transport: Transport,
    device: torch.device,
    shared: Sequence[Shared] = (),
    num_groups: int = 0,
) -> bool:
    """Every rank has as many rows, of the same lengths, and does the same; all ranks call it.

    Else they would wait for messages that never come, or add up numbers that mean different
    things. Also the barrier that a step's clocks start from.

    Args:
        layout: the rows of the step.
        told: what else has to be the same everywhere, in words, by name.
        transport: the network.
        device: this rank's device.
        shared: what ranks that hold the same have to agree on.
        num_groups: how many groups of such ranks there are.

    Returns:
        Whether the ranks of every group agree; the same on each of all ranks.

    Raises:
        InputError: the ranks differ; on each of them.
    """
    sizes = {"rows": layout.global_batch_size, **layout.lengths}
    marks = [zlib.crc32(text.encode()) >> 10 for text in told.values()]  # squares stay exact
    members = dict.fromkeys(range(num_groups), 0) | {s.group: 1 for s in shared}
    of_groups = dict.fromkeys(range(num_groups), 0) | {s.group: s.mark for s in shared}
    numbers = [*sizes.values(), *marks]
    here = torch.tensor([*numbers, *members.values(), *of_groups.values()], dtype=torch.float64)
    sums = torch.stack([here, here * here]).to(device)
    transport.sum(sums, tuple(range(transport.world_size))).wait()
    totals, all_squares = (found[: len(numbers)] for found in sums.tolist())
    differ = [
        total * total != squares * transport.world_size
        for total, squares in zip(totals, all_squares, strict=True)
    ]
    for (name, text), wrong in zip(told.items(), differ[len(sizes) :], strict=True):
        if wrong:
            raise InputError(
                f"the ranks were told different things: {name} is {text} here, and not so on "
                "another rank; run the same program with the same settings on every rank"
            )
    for (name, size), total, wrong in zip(sizes.items(), totals, differ, strict=False):
        if wrong:
            mean = total / transport.world_size
            raise InputError(
                f"the ranks were given batches of different sizes: {size} {name} here, {mean:g} on "
                "average; hand every rank the same global batch"
            )
    counts, group_totals = sums[0, len(numbers) :].reshape(2, -1)
    group_squares = sums[1, len(numbers) + num_groups :]
    return bool((group_totals * group_totals == group_squares * counts).all())


def check_weights(
    parameters: Mapping[str, torch.Tensor],
    ranks: tuple[int, ...],
    tied: Mapping[str, tuple[int, ...]],
    transport: Transport,
) -> None:
    """All holders of a parameter have the same values, bit by bit; all ranks call it.

    Replicas that were built under other random numbers would each update weights of their own.

    Args:
        parameters: this rank's, by name.
        ranks: the replicas of its stages.
        tied: for each parameter that other stages hold too, the ranks of all of them, in the same
            order on every holder.
        transport: the network.

    Raises:
        InputError: they differ; on each rank that holds the parameter.
    """
    own = [name for name in parameters if name not in tied]
    for names, members in [(own, ranks), *(([name], group) for name, group in tied.items())]:
        if len(members) == 1 or not names:
            continue
        here = torch.stack([_mark(parameters[name]) for name in names]).to(torch.float64)
        sums = torch.stack([here, here * here])
        transport.sum(sums, members).wait()
        differ = sums[0] * sums[0] != sums[1] * len(members)
        if differ.any():
            name = names[int(differ.nonzero()[0])]
            raise InputError(
                f'ranks {", ".join(map(str, members))} hold parameter "{name}" with different '
                "values; seed before the model is built, or load the same weights, on every rank"
            )


def check_updates(writes: bool, transport: Transport, device: torch.device) -> None:
    """Some rank has something to update; all ranks call it.

    Args:
        writes: this rank has.
        transport: the network.
        device: this rank's device.

    Raises:
        InputError: none has; on each of them.
    """
    count = torch.tensor(float(writes), dtype=torch.float64, device=device)
    transport.sum(count, tuple(range(transport.world_size))).wait()
    if not count.item():
        raise InputError(
            "no rank has a parameter to update: all are frozen, or the optimizer's factory takes none "
            "of those that it gets; leave some trainable, or evaluate instead"
        )


def _mark(parameter: torch.Tensor) -> torch.Tensor:
    """A number whose square is exact, and that other values nearly always change."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    value = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    bits = value.detach().contiguous().view(whole[value.element_size()])
    if bits.element_size() > 2:
        # By a prime: the low bits of float32 weights that became float64 are all zero.
        bits = bits.remainder(_PRIME)
    return bits.sum(dtype=torch.int64) % _PRIME


class GlobalLoss(NamedTuple):
    """Of a global batch: its loss and metrics, NaN if no row has weight.

    Attributes:
        has_weight: some row has.
        has_gradient: the loss of some piece depends on the model.
    """

    loss: float
    metrics: dict[str, float]
    has_weight: bool
    has_gradient: bool

    def trains(self) -> bool:
        """Whether the batch gave gradients; without weight it gives none.

        Raises:
            InputError: rows have weight, but the loss of none depends on the model.
        """
        if self.has_weight and not self.has_gradient:
            raise InputError(
                "the loss of no row depends on the model's parameters, so there is nothing to train "
                "on; look for a detach, or for a constant that the loss returns, or give such rows "
                "weight 0"
            )
        return self.has_weight


def start_global_loss(
    batch: Batch, metrics: Sequence[str], transport: Transport, device: torch.device
) -> Callable[[], GlobalLoss]:
    """Start adding up the loss of the global batch and its metrics; all ranks call it.

    What it returns waits for them.

    Args:
        batch: this rank's; one without an objective adds zeros.
        metrics: the names of those that were computed, the same on every rank.
        transport: the network.
        device: this rank's device.
    """
    sums = torch.zeros(3 + len(metrics), dtype=torch.float64)
    if batch.objective is not None:
        sums[0] = batch.objective.share()
        sums[1] = float(batch.objective.has_weight)
        sums[2] = float(batch.objective.has_gradient)
        if batch.objective.metrics is not None:
            shares = batch.objective.metrics.shares
            sums[3:] = torch.tensor([shares[name] for name in metrics], dtype=torch.float64)
    sums = sums.to(device)
    pending = transport.sum(sums, tuple(range(transport.world_size)))

    def wait() -> GlobalLoss:
        pending.wait()
        loss, pieces, trained, *found = sums.tolist()
        if not pieces:
            loss, found = math.nan, [math.nan] * len(found)
        return GlobalLoss(loss, dict(zip(metrics, found, strict=True)), bool(pieces), bool(trained))

    return wait
