"""Why a candidate was refused: which stage, how many bytes for what, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

from dapple.costs import StageMemory
from dapple.units import format_bytes

_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "received_inputs": "received inputs",
    "received_gradients": "received gradients",
    "sent_gradients": "gradients under way",
    "workspace": "workspace",
    "casts": "weights cast by autocast",
}


@dataclass(frozen=True)
class Refusal:
    """A candidate that does not fit the devices' memory.

    Attributes:
        name: what was refused, such as "dp".
        stage: the first stage that does not fit, of `num_stages`.
        layers: the stage's layers, a half-open range.
        devices: the stage's devices.
        device_kind: the kind of the one of them that lacks most.
        micro_batch_rows: rows of a micro-batch before the replica split; the least tried.
        in_flight: K_i that the bytes are for.
        needed: bytes by what they are for, on the replica with most rows.
        available: bytes of the device.
        optimizer: the optimizer whose state is counted.
    """

    name: str
    stage: int
    num_stages: int
    layers: tuple[int, int]
    devices: tuple[int, ...]
    device_kind: str
    micro_batch_rows: int
    in_flight: int
    needed: StageMemory
    available: int
    optimizer: str

    @property
    def excess(self) -> int:
        """Bytes above what the device has."""
        return self.needed.total - self.available

    @property
    def remedy(self) -> str:
        """What would make it fit, in words."""
        fixed = self.needed.total - self.needed.dynamic
        more = f"devices with {format_bytes(self.needed.total)}"
        if fixed > self.available:
            if self.layers[1] - self.layers[0] > 1:
                return f"cut its layers into more stages, or take {more}"
            return f"this one layer needs {more}, or a leaner optimizer than {self.optimizer}"
        if self.micro_batch_rows > 1:
            return f"use a smaller micro-batch, or take {more}"
        if self.layers[1] - self.layers[0] > 1:
            return f"cut its layers into more stages, or take {more}"
        return f"this one layer needs {more}"

    def parts(self) -> str:
        """The bytes by what they are for, in words; parts without bytes are left out."""
        sizes = {words: getattr(self.needed, part) for part, words in _PARTS.items()}
        return ", ".join(f"{words} {format_bytes(n)}" for words, n in sizes.items() if n > 0)

    def __str__(self) -> str:
        where = f"stage {self.stage} of {self.num_stages} " if self.num_stages > 1 else ""
        return (
            f"{self.name} refused: {where}needs {format_bytes(self.needed.total)} of "
            f"{format_bytes(self.available)} on {self.device_kind} ({self.parts()}; micro-batch "
            f"{self.micro_batch_rows}); {self.remedy}"
        )
