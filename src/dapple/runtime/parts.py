"""The stages of one rank: their programs, parameters and boundaries, and the schedule they follow."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dapple.costs import recomputed_ranges
from dapple.errors import InputError
from dapple.graph import LayerGraph, StageProgram
from dapple.graph.precision import Precision
from dapple.runtime.compiling import CompileOptions, compiled, what_blocks
from dapple.runtime.exchange import Boundaries
from dapple.runtime.process import move_to
from dapple.runtime.recorder import Recorder
from dapple.runtime.stage import StageRunner
from dapple.runtime.statistics import BatchNormRule, BatchStatistics
from dapple.runtime.topology import Topology
from dapple.runtime.wiring import links_between_stages
from dapple.schedule import Link, Room, Schedule, planned_schedule


@dataclass(frozen=True)
class Mode:
    """A rank's stages in training or in evaluation.

    The two modes may compute other tensors, or the same ones under other names.

    Attributes:
        programs: per stage its layers.
        boundaries: per stage what it reads and makes.
        links: which stages of the model exchange tensors.
    """

    programs: dict[int, StageProgram]
    boundaries: dict[int, Boundaries]
    links: tuple[Link, ...]

    @property
    def reads_inputs(self) -> set[str]:
        """Names of the model's inputs that some stage reads."""
        return {name for program in self.programs.values() for name in program.reads_inputs}

    def written_buffers(self) -> list[torch.Tensor]:
        """Buffers of stages whose forward writes into some."""
        return [
            buffer
            for program in self.programs.values()
            if program.writes_buffers
            for buffer in program.module.buffers()
        ]


class Parts:
    """What one rank holds of the model. Frees all else in the model that was captured.

    Args:
        graph: the captured model.
        topology: this rank's place.
        device: where its parameters go.
        precision: what it computes in.
        batch_norm: over which rows its batch norms take statistics.
        compile: whether and how its stages are compiled.

    Raises:
        InputError: the stages can't be compiled as asked.
        ScheduleError: the plan's schedule would not end, or is for other stages.
    """

    def __init__(
        self,
        graph: LayerGraph,
        topology: Topology,
        device: torch.device,
        precision: Precision,
        batch_norm: BatchNormRule = "global",
        compile: CompileOptions = False,
    ) -> None:
        self._graph = graph
        self._topology = topology
        self._precision = precision
        links = links_between_stages(graph, topology)
        self._links = links
        schedule, _ = self.schedule(topology.plan.num_micro_batches)
        self.training = self._mode(True, links)
        self.evaluation = self._mode(False, links_between_stages(graph, topology, False))
        self._release_others()
        move_to(device, *self._modules())
        if compile is not False and schedule.splits_backward:
            raise InputError(
                f"{schedule.name} splits backwards, which can't be compiled as well; leave out "
                "compile, or take a schedule with whole backwards"
            )
        for mode in (self.training, self.evaluation):
            for stage, program in mode.programs.items():
                layers = topology.plan.stages[stage]
                again = bool(recomputed_ranges(layers, graph.num_layers))
                blocked = what_blocks(graph, layers, again, batch_norm == "global")
                mode.programs[stage] = compiled(program, compile, stage, blocked)
        self._splits_backward = schedule.splits_backward

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one trainer lives as long as its process
    def schedule(self, num_micro_batches: int) -> tuple[Schedule, Room]:
        """The schedule of a step, and the room for messages that it needs.

        Raises:
            ScheduleError: it would not end, or is for other stages or micro-batches.
        """
        plan = self._topology.plan
        warmup = [stage.warmup for stage in plan.stages]
        return planned_schedule(
            plan.schedule, num_micro_batches, warmup, plan.positions, self._links
        )

    def runners(
        self,
        statistics: Mapping[int, BatchStatistics],
        device: torch.device,
        recorder: Recorder,
    ) -> dict[int, StageRunner]:
        """What runs each stage in training."""
        return {
            stage: StageRunner(
                program,
                statistics[stage],
                device,
                recorder,
                self._splits_backward,
                self.training.boundaries[stage].certain_reads,
            )
            for stage, program in self.training.programs.items()
        }

    def trainable(self) -> dict[str, nn.Parameter]:
        """This rank's trainable parameters by name; one that several of its stages read, once."""
        return {
            name: parameter
            for program in self.training.programs.values()
            for name, parameter in program.module.named_parameters()
            if parameter.requires_grad
        }

    def frozen(self) -> dict[str, nn.Parameter]:
        """Its other parameters by name."""
        return {
            name: parameter
            for program in self.training.programs.values()
            for name, parameter in program.module.named_parameters()
            if not parameter.requires_grad
        }

    def parameter_orders(self) -> dict[int, list[str]]:
        """Per stage the names of its trainable parameters, in the order of first use."""
        orders = {}
        for stage, program in self.training.programs.items():
            held = [n for n, p in program.module.named_parameters() if p.requires_grad]
            used = [name for name in program.parameter_order if name in held]
            orders[stage] = list(dict.fromkeys([*used, *held]))
        return orders

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers by name; those that no stage reads, at stage 0's."""
        own: dict[str, torch.Tensor] = {}
        for program in self.training.programs.values():
            own |= program.module.state_dict(keep_vars=True)
        return own | self._graph.unread if self._topology.stage == 0 else own

    def tensors(self) -> Iterable[torch.Tensor]:
        """The parameters and buffers of all its stages."""
        for program in self.training.programs.values():
            yield from program.module.parameters()
            yield from program.module.buffers()

    def _mode(self, training: bool, links: tuple[Link, ...]) -> Mode:
        topology = self._topology
        programs = {}
        for stage in topology.stages:
            layers = topology.plan.stages[stage]
            again = recomputed_ranges(layers, self._graph.num_layers) if training else ()
            program = self._graph.stage(layers.start, layers.stop, training, again)
            programs[stage] = self._precision.program(self._graph, program, training)
        uses = self._graph.certain_gradients() if training and links else ()
        certain = {(name, topology.stage_of_layer(layer)) for name, layer in uses}
        boundaries = {
            stage: Boundaries(topology, stage, program.reads, program.makes, certain)
            for stage, program in programs.items()
        }
        return Mode(programs, boundaries, links)

    def _modules(self) -> list[nn.Module]:
        modes = (self.training, self.evaluation)
        return [program.module for mode in modes for program in mode.programs.values()]

    def _release_others(self) -> None:
        own = {id(tensor) for tensor in self.state().values()}
        for module in self._modules():
            own |= {id(t) for t in (*module.parameters(), *module.buffers())}
        self._graph.release(own)
