"""Which parameters are frozen: those of the start for good, others for a while and everywhere alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from dapple.errors import InputError
from dapple.runtime.transport import Transport


class Shared(NamedTuple):
    """Something that the ranks of a group have to agree on.

    Attributes:
        group: which group; the same numbers on every rank.
        mark: a whole number below 2**22 that stands for what this rank has.
    """

    group: int
    mark: int


class Freezing:
    """Looks at the parameters of one rank before each step.

    Args:
        trainable: those that could be trained when the trainer was made, by name.
        frozen: those that could not.
        position: this rank's place in the pipeline: its replicas hold the same parameters.
        num_positions: of all ranks.
        tied: for each tied parameter that other positions hold too, the ranks of all its holders.
        names: of the model's tied parameters, in an order that is the same on every rank.
    """

    def __init__(
        self,
        trainable: Mapping[str, nn.Parameter],
        frozen: Mapping[str, nn.Parameter],
        position: int,
        num_positions: int,
        tied: Mapping[str, tuple[int, ...]],
        names: Sequence[str],
    ) -> None:
        self._trainable = trainable
        self._frozen = frozen
        groups: dict[int, list[nn.Parameter]] = {}
        for name, parameter in trainable.items():
            group = num_positions + names.index(name) if name in tied else position
            groups.setdefault(group, []).append(parameter)
        self._groups = groups
        self.num_groups = num_positions + len(names)

    def check_thawed(self) -> None:
        """What was frozen when the trainer was made is frozen now.

        Its gradients have no way to other ranks and into the optimizer.

        Raises:
            InputError: some parameter is not.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise InputError(
                    f'parameter "{name}" was frozen when the trainer was made, and is no longer; '
                    "capture the model and make the trainer with it trainable, and freeze it "
                    "afterwards for as long as it has to be"
                )

    def shared(self) -> list[Shared]:
        """What this rank has frozen, for ranks that hold the same parameters to compare."""
        return [
            Shared(group, zlib.crc32(bytes(p.requires_grad for p in parameters)) >> 10)
            for group, parameters in self._groups.items()
        ]

    def refuse(self, model: Sequence[str], transport: Transport, device: torch.device) -> None:
        """Say which parameter is frozen on some ranks only; all ranks call it.

        Args:
            model: the names of all parameters of the model.
            transport: the network.
            device: this rank's device.

        Raises:
            InputError: some is; the same on every rank.
        """
        held = [float(name in self._trainable) for name in model]
        own = self._trainable
        trained = [float(name in own and own[name].requires_grad) for name in model]
        sums = torch.tensor([held, trained], dtype=torch.float64, device=device)
        transport.sum(sums, tuple(range(transport.world_size))).wait()
        for name, holders, count in zip(model, *sums.tolist(), strict=True):
            if 0 < count < holders:
                raise InputError(
                    f'parameter "{name}" is frozen on {holders - count:g} of the {holders:g} ranks '
                    "that hold it; freeze it by its name on all of them (the groups of a sharded "
                    "optimizer hold this rank's share only), or on none"
                )
