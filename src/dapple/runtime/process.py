"""The process that a rank runs in: its device, its process group, its random numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


def default_device() -> torch.device:
    """The accelerator of the local rank, else the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def ensure_process_group(device: torch.device) -> None:
    """Set up `torch.distributed` from torchrun's environment; alone, a group of one process."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Leave the random generators as they were found."""
    devices = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that a stage on `device` draws from: the CPU's and its own.

    `torch.manual_seed` would seed those of all devices. (Never run on a GPU so far.)
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).manual_seed(seed)


@contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Leave tensors with the values that they had."""
    saved = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in saved:
            tensor.copy_(value)


def move_to(device: torch.device, *modules: nn.Module) -> None:
    """Move parameters and buffers; modules that share a tensor share it afterwards too.

    (`Module.to` would give each module a buffer of its own, and evaluation would not see the
    running statistics of training. Never run on a GPU so far.)
    """
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.to(device)


def mixed_seed(place: tuple[int, ...]) -> int:
    """A 63-bit seed from a place; splitmix64 steps, so that near places are far apart."""
    state = 0
    for number in place:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        state ^= state >> 31
    return state >> 1
