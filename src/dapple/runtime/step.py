"""One training step of one rank: a loop over the schedule's actions, by docs/semantics.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from dapple.graph import SeedLayer
from dapple.records.timeline import SpanKind
from dapple.runtime.batch import Batch
from dapple.runtime.exchange import Boundaries, Exchange
from dapple.runtime.layout import Layout
from dapple.runtime.recorder import Recorder
from dapple.runtime.stage import StageRunner
from dapple.runtime.transport import Transport
from dapple.runtime.watch import ActionLog
from dapple.schedule import Action, Link, Progress, Room, Routes, Schedule

Sums = Callable[[int, bool], AbstractContextManager[object]]
_KINDS: dict[str, SpanKind] = {
    "F": "forward",
    "B": "backward",
    "I": "input",
    "W": "weight",
}


class TrainingStep:
    """Forward and backward of all micro-batches of one global batch on one rank.

    Args:
        transport: the network.
        layout: the rows of this step.
        schedule: the actions; this rank runs those of its position.
        room: how far ahead receives are posted, from `check_schedule`.
        links: which stages exchange tensors.
        runners: this rank's stages.
        boundaries: what each of them reads and makes.
        device: this rank's device.
        progress: where the last action is noted.
        recorder: where spans are noted.
        seeds: (micro-batch, first row) -> seeds the generators for each layer of that piece.
        sums: (stage, no stage has a backward to come) -> what to do at the begin and end of a
            stage's last backward.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        schedule: Schedule,
        room: Room,
        links: Sequence[Link],
        runners: Mapping[int, StageRunner],
        boundaries: Mapping[int, Boundaries],
        device: torch.device,
        progress: ActionLog,
        recorder: Recorder,
        seeds: Callable[[int, int], SeedLayer],
        sums: Sums,
    ) -> None:
        self._layout = layout
        self._actions = schedule.actions[layout.topology.position]
        self._runners = runners
        self._log = _Log(progress, recorder, several=len(runners) > 1)
        self._seeds = seeds
        self._sums = sums
        self._stages_left = len(runners)
        self._exchange = Exchange(
            transport, layout, boundaries, device, _send_limits(room, boundaries)
        )
        self._receives = _Receives(schedule, room, links, layout)
        self._peak_live_bytes = 0

    @property
    def peak_boundary_bytes(self) -> int:
        """Most bytes of boundary tensors that were posted or under way after any action."""
        return self._peak_live_bytes

    def run(self, batch: Batch) -> None:
        """Run all actions, then wait for the last messages."""
        run = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        for runner in self._runners.values():
            runner.forget()
        self._receives.post(self._exchange)
        for action in self._actions:
            with self._summing(action):
                if self._layout.rows(action.micro_batch):
                    run[action.kind](action, batch)
                elif self._layout.micro_batch_rows(action.micro_batch):
                    self._absent(action)
            self._receives.count(action)
            self._receives.post(self._exchange)
            self._peak_live_bytes = max(self._peak_live_bytes, self._exchange.live_bytes)
        self._log.progress.set("send", None)
        self._exchange.finish()

    def _summing(self, action: Action) -> AbstractContextManager[object]:
        """Around an action: start sums of gradients if it completes those of its stage."""
        if not action.frees or action.micro_batch != self._layout.num_micro_batches - 1:
            return nullcontext()
        self._stages_left -= 1
        return self._sums(action.stage, self._stages_left == 0)

    def _forward(self, action: Action, batch: Batch) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        runner = self._runners[stage]
        with self._log.receiving(action):
            received = self._exchange.take_inputs(stage, micro_batch)
        with self._log.computing(action):
            where = self._layout.slice(micro_batch)
            made, results = runner.forward(
                micro_batch,
                self._layout.rows(micro_batch),
                batch.rows(where),
                received,
                self._seeds(micro_batch, where.start),
            )
            if batch.objective is not None and runner.program.has_results:
                loss = batch.objective.loss(micro_batch, where, results)
                runner.set_loss(micro_batch, loss)
        self._exchange.send_outputs(stage, micro_batch, made)

    def _backward(self, action: Action, batch: Batch) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        with self._log.receiving(action):
            gradients = self._exchange.take_gradients(stage, micro_batch)
        with self._log.computing(action):
            results = self._runners[stage].backward(
                micro_batch, gradients, weights=action.kind == "B"
            )
        self._exchange.send_gradients(stage, micro_batch, results)
        self._exchange.release_outputs(stage, micro_batch)

    def _absent(self, action: Action) -> None:
        """Take part in an action of which this replica has no rows."""
        runner = self._runners[action.stage]
        if action.kind == "F":
            self._log.note(action)
            runner.absent_forward()
        elif action.returns:
            self._log.note(action)
            runner.absent_backward()

    def _weights(self, action: Action, batch: Batch) -> None:
        with self._log.computing(action):
            self._runners[action.stage].backward_weights(action.micro_batch)


def _send_limits(room: Room, boundaries: Mapping[int, Boundaries]) -> dict[int, int]:
    """Gradients of how many micro-batches a stage may have under way before it waits."""
    if len(boundaries) == 1:
        return {stage: room.inputs[stage] + 1 for stage in boundaries}
    # Its producers have as many micro-batches in flight at most: an older one has been received,
    # so the wait is over when it starts, in whatever order the stages of a rank take turns.
    return {
        stage: 1 + max([room.inputs[stage], *(room.inputs[p] for p in own.producers)])
        for stage, own in boundaries.items()
    }


class _Receives:
    """The receives of one rank that are still to be posted, per sending position."""

    def __init__(
        self, schedule: Schedule, room: Room, links: Sequence[Link], layout: Layout
    ) -> None:
        here = layout.topology.position
        routes = Routes(schedule, links)
        self._room = room
        self._progress = Progress(schedule.num_stages)
        self._queues = [
            deque(m for m in routes.between(row, here) if layout.rows(m.micro_batch))
            for sender, row in enumerate(schedule.actions)
            if sender != here
        ]

    def count(self, action: Action) -> None:
        """An action has ended."""
        self._progress.count(action)

    def post(self, exchange: Exchange) -> None:
        """Post what there is room for, in the order in which each position sends."""
        for queue in self._queues:
            while queue and self._progress.allows(queue[0], self._room):
                exchange.post(queue.popleft())


class _Log:
    """Notes what a rank does, for the other ranks and for the timeline."""

    def __init__(self, progress: ActionLog, recorder: Recorder, several: bool) -> None:
        self.progress = progress
        self._recorder = recorder
        self._several = several

    def receiving(self, action: Action) -> AbstractContextManager[None]:
        """Around waiting for what an action needs."""
        return self._noted("receive", action)

    def computing(self, action: Action) -> AbstractContextManager[None]:
        """Around an action."""
        return self._noted(_KINDS[action.kind], action)

    def note(self, action: Action, kind: SpanKind | None = None) -> None:
        """What is done now."""
        name: str = kind or _KINDS[action.kind]
        if self._several:
            name = f"{name} of stage {action.stage}"
        self.progress.set(name, action.micro_batch)

    @contextmanager
    def _noted(self, kind: SpanKind, action: Action) -> Iterator[None]:
        self.note(action, kind)
        with self._recorder.span(kind, action.micro_batch, action.stage):
            yield


class EvaluationStep:
    """Forward of all micro-batches of one global batch on one rank; touches no training state.

    Groups of as many micro-batches as there are positions pass one stage after the other. All
    ranks go through (group, stage, micro-batch) in this order, so none waits for itself.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        links: Sequence[Link],
        runners: Mapping[int, StageRunner],
        boundaries: Mapping[int, Boundaries],
        device: torch.device,
        progress: ActionLog,
    ) -> None:
        self._layout = layout
        self._runners = runners
        self._progress = progress
        plan = layout.topology.plan
        size, total = len(plan.positions), layout.num_micro_batches
        rows = tuple(
            tuple(
                Action(stage, "F", m)
                for start in range(0, total, size)
                for stage in stages
                for m in range(start, min(start + size, total))
            )
            for stages in plan.positions
        )
        # One stage per rank: one micro-batch in work, one on its way. Else a whole group has to
        # find room, or a message for later in it could block one that is needed now.
        self._ahead = 1 if plan.virtual == 1 else size
        self._schedule = Schedule("evaluation", total, rows)
        room = Room.of([self._ahead] * plan.num_stages)
        self._exchange = Exchange(transport, layout, boundaries, device, dict.fromkeys(runners, 0))
        self._receives = _Receives(self._schedule, room, links, layout)

    def run(self, batch: Batch) -> None:
        """Run all forwards."""
        sent: deque[tuple[int, int]] = deque()
        self._receives.post(self._exchange)
        for action in self._schedule.actions[self._layout.topology.position]:
            stage, micro_batch = action.stage, action.micro_batch
            if self._layout.rows(micro_batch):
                self._progress.set("evaluate", micro_batch)
                self._forward(action, batch)
                sent.append((stage, micro_batch))
            elif self._layout.micro_batch_rows(micro_batch):
                self._progress.set("evaluate", micro_batch)
                self._runners[stage].absent_forward()
            # A forward frees its inputs at once here.
            self._receives.count(action)
            self._receives.count(action._replace(kind="B"))
            self._receives.post(self._exchange)
            if len(sent) > self._ahead * len(self._runners):
                self._exchange.release_outputs(*sent.popleft())
        self._exchange.finish()

    def _forward(self, action: Action, batch: Batch) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        runner = self._runners[stage]
        received = self._exchange.take_inputs(stage, micro_batch)
        where = self._layout.slice(micro_batch)
        made, results = runner.evaluate(self._layout.rows(micro_batch), batch.rows(where), received)
        if batch.objective is not None and runner.program.has_results:
            batch.objective.loss(micro_batch, where, results)
        if batch.outputs is not None and runner.program.has_results:
            batch.outputs.add(where, results)
        self._exchange.send_outputs(stage, micro_batch, made)
