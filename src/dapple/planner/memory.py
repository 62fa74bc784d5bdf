"""What fits the devices' memory: how many micro-batches in flight, and why a stage is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dapple.costs import CostModel, StageMemory, rank_peak_bytes, split_rows, stage_memory
from dapple.planner.layout import Layout
from dapple.planner.refusal import Refusal
from dapple.planner.symmetry import Symmetry
from dapple.records import StagePlan
from dapple.schedule import Room, Schedule

OPTIMIZER_STATE = {
    "adamw": 2.0,
    "adam": 2.0,
    "sgd": 0.0,
    "momentum": 1.0,
    "adadelta": 2.0,
    "adafactor": 0.0,
    "adagrad": 1.0,
    "adamax": 2.0,
    "asgd": 1.0,
    "muon": 1.0,
    "nadam": 2.0,
    "radam": 2.0,
    "rmsprop": 1.0,
    "rprop": 2.0,
}
"""Bytes of optimizer state per byte of parameters, by the class in torch.optim with its default
arguments; "momentum" is SGD with momentum. Adafactor's rows and columns count as nothing.
"""
_ROUNDING = 8
"""Bytes that the rounding of a stage's parts can amount to."""


class Memory:
    """The memory of a cluster's devices, and what stages need of it.

    Args:
        model: costs of the layers.
        symmetry: the cluster's devices.
        global_batch_size: rows of a step.
        optimizer: one of `OPTIMIZER_STATE`.
    """

    def __init__(
        self, model: CostModel, symmetry: Symmetry, global_batch_size: int, optimizer: str
    ) -> None:
        self._model = model
        self._symmetry = symmetry
        self._batch = global_batch_size
        self._optimizer = optimizer
        self._kinds = model.cluster.kind_of_device()

    def _bytes(
        self,
        stages: Sequence[StagePlan],
        number: int,
        rows: int,
        in_flight: int,
        replica: int | None,
    ) -> StageMemory | None:
        return stage_memory(
            self._model,
            stages,
            number,
            rows,
            in_flight,
            optimizer_state_factor=OPTIMIZER_STATE[self._optimizer],
            replica=replica,
        )

    def _tightest(self, stage: StagePlan, rows: int) -> list[tuple[int, int | None]]:
        """Per memory size in the stage: (bytes available, the replica with most rows there).

        Parameters stay whole when state is shared out. Where rows and state are uneven, the device
        with the least memory must hold the most of both: no replica in particular, so None.
        """
        if stage.shard != "none":
            return [(self._symmetry.least_memory(stage.devices), None)]
        split = split_rows(rows, stage.replicas, stage.rows)
        best: dict[int, int] = {}
        for replica, device in enumerate(stage.devices):
            memory = self._kinds[device].memory
            if memory not in best or split[replica] > split[best[memory]]:
                best[memory] = replica
        return [(available, best[available]) for available in sorted(best)]

    def allowed_in_flight(
        self, stages: Sequence[StagePlan], number: int, micro_batches: int, want: int
    ) -> int:
        """How many micro-batches in flight fit; at most as many as wanted, 0 if not even one."""
        rows = math.ceil(self._batch / micro_batches)
        allowed = want
        for available, replica in self._tightest(stages[number], rows):
            one = self._bytes(stages, number, rows, 1, replica)
            two = self._bytes(stages, number, rows, 2, replica)
            if one is None or two is None:
                return want
            if one.total > available:
                return 0
            # Memory is linear in K_i, up to the rounding of each part.
            step = max(two.total - one.total, 1)
            allowed = min(allowed, 1 + (available - one.total) // step)
            if allowed > 1 and available - one.total - (allowed - 1) * step < _ROUNDING:
                here = self._bytes(stages, number, rows, allowed, replica)
                allowed -= here is not None and here.total > available
        return allowed

    def too_full(
        self, stages: Sequence[StagePlan], micro_batches: int, schedule: Schedule, room: Room
    ) -> list[int]:
        """The stages on devices whose memory does not suffice; none where it is not known.

        Args:
            stages: all stages, those that share devices split rows alike.
            micro_batches: M.
            schedule: what each position computes.
            room: micro-batches that are received ahead.
        """
        rows = math.ceil(self._batch / micro_batches)
        found: list[int] = []
        for position, own in enumerate(schedule.stages):
            peaks = (
                (
                    available,
                    rank_peak_bytes(
                        self._model,
                        stages,
                        schedule,
                        room,
                        position,
                        rows,
                        optimizer_state_factor=OPTIMIZER_STATE[self._optimizer],
                        replica=replica,
                    ),
                )
                for available, replica in self._tightest(stages[own[0]], rows)
            )
            if any(peak is not None and peak > available for available, peak in peaks):
                found += own
        return found

    def refusal(
        self,
        layout: Layout,
        name: str,
        stages: Sequence[StagePlan],
        number: int,
        least: int,
        holds_all: bool = False,
    ) -> Refusal:
        """Why a stage is refused that cannot hold the least number of micro-batches in flight.

        Args:
            layout, name, stages, number: what is refused, and which of its stages.
            least: that number.
            holds_all: it is all of them, by the schedule.
        """
        rows = math.ceil(self._batch / layout.micro_batches)
        worst: tuple[int, StageMemory, int] | None = None
        for available, replica in self._tightest(stages[number], rows):
            memory = self._bytes(stages, number, rows, least, replica)
            if memory is not None and (worst is None or memory.total - available > worst[0]):
                worst = memory.total - available, memory, available
        kinds = [self._kinds[device] for device in stages[number].devices]
        assert worst is not None, "only a stage whose memory is known is refused"
        return Refusal(
            name=name,
            stage=number,
            num_stages=len(stages),
            layers=(stages[number].start, stages[number].stop),
            devices=stages[number].devices,
            device_kind=next(kind.name for kind in kinds if kind.memory == worst[2]),
            micro_batch_rows=rows,
            in_flight=least,
            needed=worst[1],
            available=worst[2],
            optimizer=self._optimizer,
            holds_all=holds_all,
            recomputed=bool(stages[number].recompute),
        )
