"""The whole model's weights on disk, under its own names, from ranks that hold a part each."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def write_weights(state: Mapping[str, torch.Tensor], target: Path, rank: int) -> None:
    """Write weights; all ranks call it, each with its part.

    Args:
        state: this rank's tensors by the model's names; replicas hold the same ones.
        target: a path that ends in ".pt" becomes one file for `torch.load`, made by rank 0; any
            other a folder for `torch.distributed.checkpoint`, which no rank has to hold whole.
        rank: this rank.
    """
    single = target.suffix == ".pt"
    folder = target.with_suffix(".sharded") if single else target
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(dict(state), checkpoint_id=folder, no_dist=not dist.is_initialized())
    if single and rank == 0:
        dcp_to_torch_save(folder, target)
        shutil.rmtree(folder)
