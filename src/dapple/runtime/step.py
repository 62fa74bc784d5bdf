"""One training step of one rank: a loop over the schedule's actions, by docs/semantics.md."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from dapple.graph import SeedLayer
from dapple.runtime.batch import Batch
from dapple.runtime.exchange import Boundaries, Exchange
from dapple.runtime.layout import Layout
from dapple.runtime.recorder import Recorder
from dapple.runtime.stage import StageRunner
from dapple.runtime.transport import Transport
from dapple.runtime.watch import ActionLog
from dapple.schedule import Action, Schedule

RECEIVE_AHEAD = 1
GRADIENT_WINDOW = 2


class TrainingStep:
    """Forward and backward of all micro-batches of one global batch on one rank.

    Args:
        transport: the network.
        layout: the rows of this step.
        schedule: the actions; this rank runs those of its stage.
        runner: the stage.
        boundaries: what the stage reads and makes.
        device: this rank's device.
        progress: where the last action is noted.
        recorder: where spans are noted.
        seeds: (micro-batch, first row) -> seeds the generators for each layer of that piece.
        sums: what to do at the begin and end of the last micro-batch's backward.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        schedule: Schedule,
        runner: StageRunner,
        boundaries: Boundaries,
        device: torch.device,
        progress: ActionLog,
        recorder: Recorder,
        seeds: Callable[[int, int], SeedLayer],
        sums: AbstractContextManager[object],
    ) -> None:
        self._layout = layout
        self._actions = schedule.actions[layout.topology.stage]
        self._window = schedule.in_flight()[layout.topology.stage]
        self._runner = runner
        self._progress = progress
        self._recorder = recorder
        self._seeds = seeds
        self._sums = sums
        self._exchange = Exchange(
            transport, layout, boundaries, device, self._window + RECEIVE_AHEAD
        )
        self._forwards_done = 0
        self._backwards_done = 0
        self._peak_live_bytes = 0

    @property
    def peak_boundary_bytes(self) -> int:
        """Most bytes of boundary tensors that were posted or under way after any action."""
        return self._peak_live_bytes

    def run(self, batch: Batch) -> None:
        """Run all actions, then wait for the last messages."""
        for micro_batch in range(min(self._window + RECEIVE_AHEAD, len(self._actions) // 2)):
            if self._layout.rows(micro_batch):
                self._exchange.post_inputs(micro_batch)
        for action in self._actions:
            if action.kind == "F":
                self._forward(action, batch)
            elif self._backwards_done == len(self._actions) // 2 - 1:
                with self._sums:
                    self._backward(action)
            else:
                self._backward(action)
            self._peak_live_bytes = max(self._peak_live_bytes, self._exchange.live_bytes)
        self._progress.set("send", None)
        self._exchange.finish()

    def _forward(self, action: Action, batch: Batch) -> None:
        micro_batch = action.micro_batch
        rows = self._layout.rows(micro_batch)
        self._forwards_done += 1
        if rows:
            self._progress.set("receive", micro_batch)
            with self._recorder.span("receive", micro_batch):
                received = self._exchange.take_inputs(micro_batch)
            self._progress.set("forward", micro_batch)
            with self._recorder.span("forward", micro_batch):
                where = self._layout.slice(micro_batch)
                seed = self._seeds(micro_batch, where.start)
                made, results = self._runner.forward(
                    micro_batch, rows, batch.rows(where), received, seed
                )
                if batch.objective is not None:
                    loss = batch.objective.loss(micro_batch, where, results)
                    self._runner.set_loss(micro_batch, loss)
            self._exchange.send_outputs(micro_batch, made)
        elif self._layout.micro_batch_rows(micro_batch):
            self._progress.set("forward", micro_batch)
            self._runner.absent_forward()
        if micro_batch < self._backwards_done + GRADIENT_WINDOW:
            self._post_gradients(micro_batch)

    def _backward(self, action: Action) -> None:
        micro_batch = action.micro_batch
        if self._layout.rows(micro_batch):
            self._progress.set("receive", micro_batch)
            with self._recorder.span("receive", micro_batch):
                gradients = self._exchange.take_gradients(micro_batch)
            self._progress.set("backward", micro_batch)
            with self._recorder.span("backward", micro_batch):
                results = self._runner.backward(micro_batch, gradients)
            self._exchange.send_gradients(micro_batch, results)
            self._exchange.release_outputs(micro_batch)
        elif self._layout.micro_batch_rows(micro_batch):
            self._progress.set("backward", micro_batch)
            self._runner.absent_backward()
        self._backwards_done += 1
        ahead = micro_batch + GRADIENT_WINDOW
        if ahead < self._forwards_done:
            self._post_gradients(ahead)
        following = micro_batch + self._window + RECEIVE_AHEAD
        if following < len(self._actions) // 2 and self._layout.rows(following):
            self._exchange.post_inputs(following)

    def _post_gradients(self, micro_batch: int) -> None:
        if self._layout.rows(micro_batch):
            self._exchange.post_gradients(micro_batch)


class EvaluationStep:
    """Forward of all micro-batches of one global batch on one rank; touches no training state."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        runner: StageRunner,
        boundaries: Boundaries,
        device: torch.device,
        progress: ActionLog,
    ) -> None:
        self._layout = layout
        self._runner = runner
        self._progress = progress
        self._exchange = Exchange(transport, layout, boundaries, device, send_limit=2)

    def run(self, batch: Batch) -> None:
        """Run all forwards."""
        whole = range(self._layout.num_micro_batches)
        active = [m for m in whole if self._layout.rows(m)]
        for micro_batch in active[: 1 + RECEIVE_AHEAD]:
            self._exchange.post_inputs(micro_batch)
        position = -1
        for micro_batch in whole:
            self._progress.set("evaluate", micro_batch)
            if not self._layout.rows(micro_batch):
                if self._layout.micro_batch_rows(micro_batch):
                    self._runner.absent_forward()
                continue
            position += 1
            received = self._exchange.take_inputs(micro_batch)
            where = self._layout.slice(micro_batch)
            made, results = self._runner.evaluate(
                self._layout.rows(micro_batch), batch.rows(where), received
            )
            if batch.objective is not None:
                batch.objective.loss(micro_batch, where, results)
            if batch.outputs is not None:
                batch.outputs.add(where, results)
            self._exchange.send_outputs(micro_batch, made)
            if position >= 1:
                self._exchange.release_outputs(active[position - 1])
            if position + 1 + RECEIVE_AHEAD < len(active):
                self._exchange.post_inputs(active[position + 1 + RECEIVE_AHEAD])
        self._exchange.finish()
