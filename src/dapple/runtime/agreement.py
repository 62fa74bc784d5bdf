"""What every rank has to agree on before a step, and the loss that all know after it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch

from dapple.errors import InputError
from dapple.runtime.batch import Batch
from dapple.runtime.layout import Layout
from dapple.runtime.transport import Transport


def check_same(
    layout: Layout, told: Mapping[str, str], transport: Transport, device: torch.device
) -> None:
    """Every rank has as many rows, of the same lengths, and does the same; all ranks call it.

    Else they would wait for messages that never come, or add up numbers that mean different
    things. Also the barrier that a step's clocks start from.

    Args:
        layout: the rows of the step.
        told: what else has to be the same everywhere, in words, by name.
        transport: the network.
        device: this rank's device.

    Raises:
        InputError: the ranks differ; on each of them.
    """
    sizes = {"rows": layout.global_batch_size, **layout.lengths}
    marks = [zlib.crc32(text.encode()) >> 10 for text in told.values()]  # squares stay exact
    here = torch.tensor([*sizes.values(), *marks], dtype=torch.float64)
    sums = torch.stack([here, here * here]).to(device)
    transport.sum(sums, tuple(range(transport.world_size))).wait()
    totals, all_squares = sums.tolist()
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


def global_loss(
    batch: Batch, metrics: Sequence[str], transport: Transport, device: torch.device
) -> tuple[float, dict[str, float]]:
    """The loss of the global batch and its metrics, NaN if no row has weight; all ranks call it.

    Args:
        batch: this rank's; one without an objective adds zeros.
        metrics: the names of those that were computed, the same on every rank.
        transport: the network.
        device: this rank's device.
    """
    sums = torch.zeros(2 + len(metrics), dtype=torch.float64)
    if batch.objective is not None:
        sums[0] = batch.objective.share()
        sums[1] = float(batch.objective.has_weight)
        if batch.objective.metrics is not None:
            shares = batch.objective.metrics.shares
            sums[2:] = torch.tensor([shares[name] for name in metrics], dtype=torch.float64)
    sums = sums.to(device)
    transport.sum(sums, tuple(range(transport.world_size))).wait()
    loss, pieces, *found = sums.tolist()
    if not pieces:
        loss, found = math.nan, [math.nan] * len(found)
    return loss, dict(zip(metrics, found, strict=True))
