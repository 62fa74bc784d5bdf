"""Evaluation mode: forwards of a global batch that touch no training state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dapple.graph.precision import Precision
from dapple.runtime.batch import Batch
from dapple.runtime.layout import Layout
from dapple.runtime.parts import Mode
from dapple.runtime.process import random_state_kept, values_kept
from dapple.runtime.stage import StageRunner
from dapple.runtime.statistics import BatchStatistics
from dapple.runtime.step import EvaluationStep
from dapple.runtime.transport import Transport
from dapple.runtime.watch import ActionLog


class Evaluator:
    """Runs one rank's stages in evaluation mode.

    Args:
        mode: the stages in evaluation mode.
        statistics: per stage, computes those of its batch norms that use the batch here, too.
        transport: the network.
        precision: of the stages.
        device: this rank's device.
        progress: where the last action is noted.
    """

    def __init__(
        self,
        mode: Mode,
        statistics: Mapping[int, BatchStatistics],
        transport: Transport,
        precision: Precision,
        device: torch.device,
        progress: ActionLog,
    ) -> None:
        self._mode = mode
        self._runners = {
            stage: StageRunner(program, statistics[stage])
            for stage, program in mode.programs.items()
        }
        self._transport = transport
        self._precision = precision
        self._device = device
        self._progress = progress

    def run(self, batch: Batch, layout: Layout) -> None:
        """All forwards; buffers and random numbers are as before."""
        step = EvaluationStep(
            self._transport,
            layout,
            self._mode.links,
            self._runners,
            self._mode.boundaries,
            self._device,
            self._progress,
        )
        written = self._mode.written_buffers()
        with random_state_kept(self._device), values_kept(written), self._precision.step():
            step.run(batch)
