"""The model's outputs for a whole batch, on every rank, from the pieces of the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dapple.errors import InputError
from dapple.graph import OutputSpec
from dapple.runtime.transport import Transport

_MAX_DIMS = 12
_TYPES = tuple(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))


class Outputs:
    """Collects what this rank's pieces give, and puts the batch together.

    A tensor with rows gets each row from the rank that computed it. One without rows, such as a
    mean, is averaged over the pieces, weighted by their rows; if it is of whole numbers or bools,
    the piece with the first row counts.

    Args:
        specs: the values that the model returns.
        rows: of the whole batch.

    Raises:
        InputError: pieces of some value can't be put together.
    """

    def __init__(self, specs: Sequence[OutputSpec], rows: int) -> None:
        for position, spec in enumerate(specs):
            if spec.problem is not None:
                raise InputError(
                    f"output {position} of the model can't be put together from pieces: "
                    f"{spec.problem}; return it with the batch as a dimension of its own"
                )
        self._specs = specs
        self._rows = rows
        self._parts: list[_Part] | None = None

    def add(self, where: slice, results: tuple[Any, ...]) -> None:
        """Take the flat outputs of a piece.

        Args:
            where: its rows in the batch.
            results: the model's flat outputs.
        """
        if self._parts is None:
            self._parts = [
                self._part(spec, list(value.shape), value.dtype, value.device)
                for spec, value in zip(self._specs, results, strict=True)
                if spec.is_tensor
            ]
        tensors = [v for v, spec in zip(results, self._specs, strict=True) if spec.is_tensor]
        for part, value in zip(self._parts, tensors, strict=True):
            part.add(where, value, (where.stop - where.start) / self._rows)

    def whole(self, transport: Transport, device: torch.device) -> list[Any]:
        """The flat outputs of the whole batch; all ranks call it.

        Args:
            transport: the network.
            device: this rank's device.
        """
        everyone = tuple(range(transport.world_size))
        tensors = [spec for spec in self._specs if spec.is_tensor]
        kinds = self._kinds(len(tensors), transport, device)
        if self._parts is None:
            self._parts = [
                self._part(spec, *kind, device) for spec, kind in zip(tensors, kinds, strict=True)
            ]
        for part in self._parts:
            part.share(transport, everyone)
        found = iter(self._parts)
        return [next(found).value() if s.is_tensor else s.constant for s in self._specs]

    def _kinds(
        self, count: int, transport: Transport, device: torch.device
    ) -> list[tuple[list[int], torch.dtype]]:
        """Shape and type of each tensor, which only ranks that computed a piece know so far."""
        table = torch.zeros(transport.world_size, count, 3 + _MAX_DIMS, dtype=torch.int64)
        for position, part in enumerate(self._parts or ()):
            row = (1, _TYPES.index(part.dtype), *part.buffer.shape)
            table[transport.rank, position, : len(row)] = torch.tensor(row)
            table[transport.rank, position, -1] = part.buffer.dim()
        table = table.to(device)
        transport.sum(table, tuple(range(transport.world_size))).wait()
        known = table[int(table[:, :, 0].any(1).int().argmax())].tolist() if count else []
        return [(row[2 : 2 + row[-1]], _TYPES[row[1]]) for row in known]

    def _part(
        self, spec: OutputSpec, shape: list[int], dtype: torch.dtype, device: torch.device
    ) -> _Part:
        if spec.row_dim is not None:
            shape[spec.row_dim] = self._rows
        averaged = spec.row_dim is None and dtype.is_floating_point
        kept = torch.float64 if averaged else dtype
        return _Part(spec.row_dim, dtype, torch.zeros(shape, dtype=kept, device=device))


@dataclass
class _Part:
    """One tensor of the output, of which this rank may have some rows; zeros elsewhere."""

    row_dim: int | None
    dtype: torch.dtype
    buffer: torch.Tensor

    @property
    def averaged(self) -> bool:
        return self.row_dim is None and self.dtype.is_floating_point

    def add(self, where: slice, value: torch.Tensor, share: float) -> None:
        if self.row_dim is not None:
            rows = self.buffer.narrow(self.row_dim, where.start, where.stop - where.start)
            rows.copy_(value)
        elif self.averaged:
            self.buffer += value.double() * share
        elif where.start == 0:
            self.buffer.copy_(value)

    def share(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        if self.averaged:
            transport.sum(self.buffer, ranks).wait()
        elif self.buffer.numel():
            # Zeros but on one rank: adding up bytes copies them exactly, whatever the type.
            transport.sum(self.buffer.view(-1).view(torch.uint8), ranks).wait()

    def value(self) -> torch.Tensor:
        return self.buffer.to(self.dtype)
