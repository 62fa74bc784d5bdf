"""Evaluation mode: forwards of a global batch that touch no training state."""

from __future__ import annotations

import torch

from dapple.graph import StageProgram
from dapple.runtime.batch import Batch
from dapple.runtime.exchange import Boundaries
from dapple.runtime.layout import Layout
from dapple.runtime.precision import Precision
from dapple.runtime.process import random_state_kept, values_kept
from dapple.runtime.stage import StageRunner
from dapple.runtime.statistics import BatchStatistics
from dapple.runtime.step import EvaluationStep
from dapple.runtime.topology import Topology
from dapple.runtime.transport import Transport
from dapple.runtime.watch import ActionLog


class Evaluator:
    """Runs one rank's stage in evaluation mode.

    Args:
        program: the stage in evaluation mode.
        statistics: computes those of its batch norms that use the batch in evaluation, too.
        topology: this rank's place.
        transport: the network.
        precision: of the stage.
        device: this rank's device.
        progress: where the last action is noted.
    """

    def __init__(
        self,
        program: StageProgram,
        statistics: BatchStatistics,
        topology: Topology,
        transport: Transport,
        precision: Precision,
        device: torch.device,
        progress: ActionLog,
    ) -> None:
        self._program = program
        self._runner = StageRunner(program, statistics)
        # The two modes may compute other tensors, or the same ones under other names.
        self._boundaries = Boundaries(topology, program.reads, program.makes)
        self._transport = transport
        self._precision = precision
        self._device = device
        self._progress = progress

    def run(self, batch: Batch, layout: Layout) -> None:
        """All forwards; buffers and random numbers are as before."""
        step = EvaluationStep(
            self._transport,
            layout,
            self._runner,
            self._boundaries,
            self._device,
            self._progress,
        )
        written = self._program.module.buffers() if self._program.writes_buffers else ()
        with random_state_kept(self._device), values_kept(written), self._precision.step():
            step.run(batch)
