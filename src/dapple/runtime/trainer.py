"""Training with a plan: one `Trainer` per rank."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapple.errors import FileError, InputError
from dapple.graph import LayerGraph, SeedLayer
from dapple.graph.precision import Precision, PrecisionName
from dapple.records import Plan, Timeline
from dapple.runtime.agreement import (
    GlobalLoss,
    plan_in_words,
    start_global_loss,
)
from dapple.runtime.batch import Batch, WeightFunction
from dapple.runtime.buffers import WrittenBuffers
from dapple.runtime.compiling import CompileOptions
from dapple.runtime.evaluation import Evaluator
from dapple.runtime.handing import Hands
from dapple.runtime.meeting import Meeting
from dapple.runtime.memory import MemoryMeter
from dapple.runtime.metrics import Metric
from dapple.runtime.objectives import Objectives
from dapple.runtime.optimizers import (
    OptimizerFactory,
    SchedulerFactory,
)
from dapple.runtime.parts import Parts
from dapple.runtime.prediction import Outputs
from dapple.runtime.process import (
    default_device,
    ensure_process_group,
    mixed_seed,
    seed_generators,
)
from dapple.runtime.recorder import Recorder
from dapple.runtime.results import Evaluation, StepResult
from dapple.runtime.statistics import BatchNormRule, BatchStatistics
from dapple.runtime.step import TrainingStep
from dapple.runtime.sums import RankGradients
from dapple.runtime.timelines import gathered_timeline
from dapple.runtime.topology import Topology
from dapple.runtime.transport import Transport
from dapple.runtime.update import UpdateRules, Verdict, make_update
from dapple.runtime.watch import Watch, watch_ranks
from dapple.runtime.weights import why_not_written, write_weights
from dapple.runtime.window import Handed
from dapple.runtime.wiring import check_model, connect, tied_ranks


class Trainer:
    """Trains one rank's part of a captured model by a plan.

    All ranks make the trainer and call its methods together, with the same batches. After it is
    made a rank holds only its own stage's parameters: those of other stages are freed, also in the
    model that was captured.

    Args:
        graph: the captured model, with the same weights on every rank.
        plan: the plan; one process per device that it uses.
        optimizer: makes the optimizer from this rank's parameters: a list that also knows their
            names and makes groups of them, see `dapple.runtime.Parameters`.
        scheduler: makes a learning-rate scheduler from that optimizer, stepped after each update.
        weight: w_i of a piece from its (inputs, targets), such as the number of unmasked tokens;
            by default its rows.
        metrics: further numbers to compute beside the loss, (output, targets) of a piece -> number,
            by name. Over a batch each is the mean over pieces by their weights, like the loss.
        clip_norm: clip the gradients to this norm over the whole model before each update; inf
            only measures it.
        norm_type: the p of that norm, any number above 0, or inf.
        error_if_nonfinite: a norm that is not finite is an error.
        precision: "float32" computes in the model's own types, "bf16" and "fp16" under autocast.
        scaler: holds the loss scale and how it changes; by default torch's own for "fp16", and none
            otherwise.
        batch_norm: batch norms of a stage with several replicas take their statistics over the rows
            of the whole micro-batch ("global"), or of each replica apart ("local").
        compile: compile the stage with `torch.compile` when it first runs: True, or its keyword
            arguments.
        device: this rank's device; by default the accelerator of the local rank, else the CPU.
        seed: for dropout: masks depend on seed, step, micro-batch, layer and first row.
        transport: the network; by default `torch.distributed`, set up by torchrun's environment.
        watch: watches the other ranks, see runtime/failure.py; by default a monitor where a launcher
            has started this rank, and nothing with a transport of one's own.
        record: note spans for `timeline`.

    Raises:
        PlanError: the plan does not fit the model or the number of processes.
        ScheduleError: the plan's schedule would not end.
    """

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        optimizer: OptimizerFactory,
        *,
        scheduler: SchedulerFactory | None = None,
        weight: WeightFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        clip_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        precision: PrecisionName = "float32",
        scaler: torch.amp.GradScaler | None = None,
        batch_norm: BatchNormRule = "global",
        compile: CompileOptions = False,
        device: torch.device | None = None,
        seed: int = 0,
        transport: Transport | None = None,
        watch: Watch | None = None,
        record: bool = True,
    ) -> None:
        check_model(graph, plan)
        self.device = device or default_device()
        if transport is None:
            ensure_process_group(self.device)
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            rank, world_size = transport.rank, transport.world_size
        self.topology = Topology.of(plan, rank, world_size)
        self._watch = watch or watch_ranks(rank, self.topology.stage, transport is None)
        self._progress = self._watch.progress
        self._graph = graph
        self._plan = plan
        self._metrics = dict(metrics or {})
        self._seed = seed
        self._steps = 0
        self._is_closed = False
        self._precision = Precision(precision, self.device)
        told = {
            "the plan": plan_in_words(plan),
            "precision": precision,
            "batch_norm": batch_norm,
            "clipping": f"{None if clip_norm is None else (float(clip_norm), float(norm_type))}",
            "the list of metrics": f"{list(self._metrics)}",
        }
        names = list(graph.parameters())
        self.parts = Parts(graph, self.topology, self.device, self._precision, batch_norm, compile)
        self._hands = Hands(graph, self.topology, self.parts, self.device)
        self._transport = transport or connect(graph, self.topology)
        trainable = self.parts.trainable()
        tied = tied_ranks(graph, self.topology, trainable)
        self._meeting = Meeting(
            graph,
            names,
            self.parts,
            self.topology,
            tied,
            told,
            self._transport,
            self.device,
            self._progress,
        )
        ranks = self.topology.ranks[self.topology.stage]
        self._gradients = RankGradients(trainable, self.parts.parameter_orders(), ranks, tied)
        self._updating = make_update(
            trainable,
            names,
            self.topology,
            tied,
            self._transport,
            self.device,
            UpdateRules(
                optimizer, scheduler, clip_norm, norm_type, error_if_nonfinite, scaler, precision
            ),
        )
        self.optimizer = self._updating.optimizer
        self.scheduler = self._updating.scheduler
        self.scaler = self._updating.scaler
        self._objectives = Objectives(
            graph,
            weight,
            self.device,
            self._transport,
            self.topology.ranks[-1],
            self._precision,
            self._metrics,
        )
        statistics, evaluation_statistics = (
            {
                stage: BatchStatistics(
                    program, self._transport, self.topology, batch_norm, self.device
                )
                for stage, program in mode.programs.items()
            }
            for mode in (self.parts.training, self.parts.evaluation)
        )
        self._evaluator = Evaluator(
            self.parts.evaluation,
            evaluation_statistics,
            self._transport,
            self._precision,
            self.device,
            self._progress,
        )
        self._written = [
            WrittenBuffers(
                program.module,
                graph.written_buffers(plan.stages[stage].start, plan.stages[stage].stop),
                self.topology,
                self._transport,
                batch_norm,
            )
            for stage, program in self.parts.training.programs.items()
        ]
        self._recorder = Recorder(
            rank, self.topology.stage, self.topology.replica, self.device, record
        )
        self.runners = self.parts.runners(statistics, self.device, self._recorder)
        self._fresh = True
        self._has_weight = False  # of what is accumulated
        self.peak_boundary_bytes = 0
        self.last_step_seconds = 0.0
        self._last_micro_batches = plan.num_micro_batches

    def close(self) -> None:
        """End the run in order: returns when every rank has come here.

        A rank that ends without it, other than by an error, closes at its exit.
        """
        self._is_closed = True
        self._watch.close()

    @property
    def rank(self) -> int:
        """This rank."""
        return self.topology.rank

    def own_rows(self, global_batch_size: int) -> list[int]:
        """The rows of a global batch that this rank reads, ascending; see `step`.

        A rank that reads none, in the middle of the pipeline, has row 0, so that there is something
        to collate; it is not looked at.
        """
        return self._hands.own_rows(global_batch_size)

    def step(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        update: bool = True,
        metrics: bool = False,
        global_batch_size: int | None = None,
    ) -> StepResult:
        """Train on one global batch.

        Args:
            inputs: all rows, as at capture: a tensor, tuple or dict. The same on every rank.
            targets: tensors with all rows; read on the ranks of the last stage.
            update: sum gradients and update parameters. False: only accumulate; the next call with
                True updates with the sum of both batches' gradients.
            metrics: compute the trainer's metrics too, on the outputs in training mode.
            global_batch_size: inputs and targets hold the rows of `own_rows` only, of a global
                batch of so many; None: they hold all rows.

        A call that raises leaves no gradients: what calls with update=False have added is lost too.

        Raises:
            InputError: the batch does not fit the captured model, a parameter that was frozen at
                first is frozen no longer, or one is frozen on some of the ranks that hold it only.
        """
        handed = self._take("step", inputs, targets, global_batch_size)
        with self._watch.guard():
            call = f"step with update={update}, metrics={metrics}"
            self._meeting.before_step(handed.layout, call, self._updating.writes)
            return self._step(handed, update, metrics)

    def evaluate(
        self, inputs: Any, targets: Any = None, *, global_batch_size: int | None = None
    ) -> Evaluation:
        """The loss on one global batch in evaluation mode, and the metrics; changes nothing.

        Args:
            inputs, targets, global_batch_size: as for `step`.
        """
        handed = self._take("evaluate", inputs, targets, global_batch_size)
        with self._watch.guard():
            self._meeting.before(handed.layout, "evaluate")
            batch = self._hands.batch(handed)
            if self.topology.is_last:
                batch.objective = self._objectives.make(handed, training=False, metrics=True)
            self._evaluator.run(batch, handed.layout)
            found = self._start_global_loss(batch)()
            return Evaluation(found.loss, found.metrics)

    def predict(self, inputs: Any) -> Any:
        """The model's output for one global batch in evaluation mode, the same on every rank.

        Rows are in the order of the inputs. A value without rows, such as a mean, is averaged over
        the pieces of the batch by their rows. Changes nothing.

        Args:
            inputs: as for `step`.

        Raises:
            InputError: the rows of some output do not lie in one dimension.
        """
        handed = self._take("predict", inputs)
        layout = handed.layout
        outputs = Outputs(self._graph.output_specs(training=False), layout.global_batch_size)
        with self._watch.guard():
            self._meeting.before(layout, "predict")
            batch = self._hands.batch(handed)
            batch.outputs = outputs if self.topology.is_last else None
            self._evaluator.run(batch, layout)
            self._progress.set("allreduce", None)
            whole = outputs.whole(self._transport, self.device)
            return self._graph.unflatten_outputs(whole, training=False)

    def measure_memory(self) -> MemoryMeter:
        """A meter for the next steps: `with trainer.measure_memory() as meter: ...`."""
        return MemoryMeter(self.device, self._resident())

    def resident_bytes(self) -> int:
        """Bytes of this rank's parameters, buffers, gradients and optimizer state."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._resident()}
        return sum(s.nbytes() for s in storages.values())

    def timeline(self, peak_bytes: int | None = None) -> Timeline:
        """The last step's spans of all ranks, in the simulator's format. All ranks call it.

        Args:
            peak_bytes: this rank's peak, if it was measured.
        """
        in_flight = self.parts.schedule(self._last_micro_batches)[0].in_flight()
        seconds, world_size = self.last_step_seconds, self._transport.world_size
        return gathered_timeline(
            self._recorder.spans(), seconds, peak_bytes, self._plan, in_flight, world_size
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers under all of the model's own names for them."""
        own = self.parts.state()
        aliases = self._graph.original_names()
        return {
            alias: value.detach() for name, value in own.items() for alias in aliases.get(name, ())
        }

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Write the whole model's weights under its own names. All ranks call it.

        A path that ends in ".pt" becomes one file for `torch.load`, any other a folder for
        `torch.distributed.checkpoint`, which no rank has to hold whole.

        Raises:
            FileError: some rank can't write there; on all of them, which may go on with another path.
        """
        target = Path(path)
        with self._watch.guard():
            self._progress.set("save weights", None)
            fault = why_not_written(target, self._transport, self.device)
            if fault is None:
                write_weights(self.state_dict(), target, self.rank)
        if fault is not None:
            raise FileError(fault)

    def _step(self, handed: Handed, update: bool, metrics: bool) -> StepResult:
        begin = time.perf_counter()
        self._recorder.start()
        if self._fresh:
            self._gradients.zero()
        else:
            self._gradients.attach()
        self._fresh = True  # should this step raise: half a sum is worth nothing
        layout, batch = handed.layout, self._hands.batch(handed)
        if self.topology.is_last:
            scale = 1.0 if self.scaler is None else self.scaler.get_scale()
            batch.objective = self._objectives.make(
                handed, training=True, scale=scale, metrics=metrics
            )
        step = TrainingStep(
            self._transport,
            layout,
            *self.parts.schedule(layout.num_micro_batches),
            self.parts.training.links,
            self.runners,
            self.parts.training.boundaries,
            self.device,
            self._progress,
            self._recorder,
            functools.partial(self._seeds, self._steps),
            self._summing if update else lambda stage, is_last: nullcontext(),
        )
        with self._precision.step():
            step.run(batch)
        for written in self._written:
            written.equalise(layout)
        self.peak_boundary_bytes = step.peak_boundary_bytes
        self._fresh = update
        # On its way while gradients are.
        whole = functools.cache(self._start_global_loss(batch, metrics))
        verdict = Verdict()
        if update:
            verdict = self._update(whole)
        self._has_weight = not update and (self._has_weight or whole().trains())
        self._steps += 1
        self.last_step_seconds = time.perf_counter() - begin
        self._last_micro_batches = layout.num_micro_batches
        return StepResult(
            whole().loss,
            layout.global_batch_size,
            self.last_step_seconds,
            verdict.gradient_norm,
            verdict.skips,
            whole().metrics,
        )

    def _take(
        self, call: str, inputs: Any, targets: Any = None, global_batch_size: int | None = None
    ) -> Handed:
        if self._is_closed:
            raise InputError(
                f"{call} was called after close(), which ended the run on this rank; close the "
                "trainer when all is done, or make another one"
            )
        return self._hands.take(inputs, targets, global_batch_size)

    def _summing(self, stage: int, is_last: bool) -> AbstractContextManager[None]:
        return self._gradients.summing(self._transport, stage, is_last)

    def _update(self, whole: Callable[[], GlobalLoss]) -> Verdict:
        self._progress.set("allreduce", None)
        with self._recorder.span("allreduce"):
            self._gradients.wait()
        # Until the last rank has done its part, which is no time of a sum.
        # Without weight the last stage has no gradients, and earlier ones may have zeros.
        verdict = Verdict(empty=True)
        if whole().trains() or self._has_weight:
            with self._recorder.span("allreduce"):
                verdict = self._updating.agree()
        self._progress.set("optimizer", None)
        if self._updating.writes:
            with self._recorder.span("optimizer"):
                self._updating.apply(verdict)
        return verdict

    def _start_global_loss(self, batch: Batch, metrics: bool = True) -> Callable[[], GlobalLoss]:
        self._progress.set("allreduce", None)
        names = list(self._metrics) if metrics else []
        return start_global_loss(batch, names, self._transport, self.device)

    def _seeds(self, step: int, micro_batch: int, first_row: int) -> SeedLayer:
        """Random numbers of a layer depend on where its piece stands, not on what ran before."""
        place = (self._seed, step, micro_batch, first_row)
        return lambda layer: seed_generators(self.device, mixed_seed((*place, layer)))

    def _resident(self) -> Iterable[torch.Tensor]:
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        moments = (v for s in states for v in s.values() if isinstance(v, torch.Tensor))
        return [*self.parts.tensors(), *self._gradients.buffers(), *moments]
