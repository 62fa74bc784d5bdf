"""The whole model's weights on disk, under its own names, from ranks that hold a part each."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from dapple.errors import FileError
from dapple.files import cannot_write, check_output
from dapple.runtime.transport import Transport


def why_not_written(target: Path, transport: Transport, device: torch.device) -> str | None:
    """Why some rank can't write weights, None if all can; all ranks call it before they do.

    Args:
        target: as for `write_weights`.
        transport: the network.
        device: this rank's device.
    """
    fault = None
    try:
        check_output(target, folder=not _is_single(target))
        check_output(_folder(target), folder=True)
    except FileError as error:
        fault = str(error)
    faulty = torch.zeros(transport.world_size, dtype=torch.float64)
    faulty[transport.rank] = float(fault is not None)
    faulty = faulty.to(device)
    transport.sum(faulty, tuple(range(transport.world_size))).wait()
    if fault is None and faulty.any():
        rank = int(faulty.nonzero()[0])
        fault = f"rank {rank} cannot write {target}; choose a path that every rank can write"
    return fault


def write_weights(state: Mapping[str, torch.Tensor], target: Path, rank: int) -> None:
    """Write weights; all ranks call it, each with its part.

    Args:
        state: this rank's tensors by the model's names; replicas hold the same ones.
        target: a path that ends in ".pt" becomes one file for `torch.load`, made by rank 0; any
            other a folder for `torch.distributed.checkpoint`, which no rank has to hold whole.
        rank: this rank.

    Raises:
        FileError: it can't be written, for want of space say.
    """
    # It takes a second to import, which who starts a run need not wait for.
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = _folder(target)
    try:
        checkpoint.save(dict(state), checkpoint_id=folder, no_dist=not dist.is_initialized())
        if _is_single(target) and rank == 0:
            # The file that was there before stays until the new one is whole.
            dcp_to_torch_save(folder, folder / target.name)
            (folder / target.name).replace(target)
            shutil.rmtree(folder)
    except OSError as error:
        raise cannot_write(target, error) from error
    except CheckpointException as error:
        # No Exception for torch, so that nobody who catches those would see it.
        first, _ = next(iter(error.failures.values()))
        if isinstance(first, OSError):
            raise cannot_write(target, first) from first
        raise first from None


def _is_single(target: Path) -> bool:
    return target.suffix == ".pt"


def _folder(target: Path) -> Path:
    """Where the ranks write their parts."""
    return target.with_suffix(".sharded") if _is_single(target) else target
