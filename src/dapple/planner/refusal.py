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
        holds_all: the schedule keeps all micro-batches in flight, as GPipe does.
        recomputed: the stage runs its forward again already.
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
    holds_all: bool = False
    recomputed: bool = False

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
        if self.holds_all:
            return self._fewer_in_flight(more)
        if self.micro_batch_rows > 1:
            return f"use a smaller micro-batch, or take {more}"
        if self.layers[1] - self.layers[0] > 1:
            return f"cut its layers into more stages, or take {more}"
        return f"this one layer needs {more}"

    def _fewer_in_flight(self, more: str) -> str:
        """Smaller micro-batches are no help where all of them are kept."""
        what = f"GPipe keeps all {self.in_flight} micro-batches"
        if self.in_flight == 1:
            what = "GPipe keeps the whole batch, however it is cut"
        ways = ["take early-backward" + (" and smaller ones" if self.in_flight == 1 else "")]
        if not self.recomputed:
            ways.append("recompute stages")
        if self.layers[1] - self.layers[0] > 1:
            ways.append("cut its layers into more stages")
        return f"{what}; {', '.join(ways)}, or take {more}"

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
