"""One of the two ranks of `benchmarks.paper.gpipe`: measures the profile, memory and time."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.runtime.ranks import answer, timed_in_turn
from dapple.cluster import Cluster
from dapple.graph import LayerGraph, capture
from dapple.profiler.chain import Chain
from dapple.profiler.links import measure_link
from dapple.profiler.local import local_cluster
from dapple.profiler.measured import measure_profile
from dapple.records import ModelProfile, Plan, StagePlan, Timeline
from dapple.records.timeline import COMPUTING
from dapple.runtime.trainer import Trainer
from dapple.schedule import warmup_counts
from dapple.simulator import simulate
from dapple.workload import Workload
from dapple.zoo import make_workload


class Side(NamedTuple):
    """A schedule, with or without recompute."""

    schedule: str
    recompute: bool

    @property
    def run(self) -> str:
        """Its name in the results."""
        name = "gpipe" if self.schedule == "gpipe" else "dapple"
        return name + ("+recompute" if self.recompute else "")


SIDES = tuple(Side(s, r) for s in ("gpipe", "early-backward") for r in (False, True))


def run(options: argparse.Namespace) -> None:
    """Measure everything; rank 0 answers with the results."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    bench = _Bench(options)
    cells = bench.cells()
    bench.measure_memory(cells)
    fitting = {str(n): bench.step_of(cell) for n, cell in enumerate(cells) if cell["fits"]}
    times = timed_in_turn(fitting, options.rounds, dist.barrier)
    for number, cell in enumerate(cells):
        cell["seconds"] = times.get(str(number))
    drawn = bench.drawn(cells)
    if dist.get_rank() == 0:
        answer({**bench.figures(), "cells": cells, "drawn": drawn})
    dist.barrier()
    bench.close()
    dist.destroy_process_group()


class _Bench:
    """The model's profile, the plans of all cells, and a trainer for each side."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counts = tuple(map(int, options.counts.split(",")))
        self.most, self.shown = max(self.counts), self.counts[1]
        workload = _workload(options)
        graph = _graph(workload, evaluation=False)
        self.parameters = sum(p.numel() for p in workload.model.parameters())  # type: ignore[union-attr]
        self.profile = measure_profile(graph, workload, batch_sizes=(options.rows,), rounds=10)
        self.speed_alone = _speed_alone(Chain(graph, workload, options.rows, _CPU))
        self.cluster: Cluster = local_cluster(2, measure_link())
        self.cut = _balanced_cut(self.profile)
        self.cap = self._cap()
        rows = self.most * options.rows
        self.inputs, self.targets = workload.inputs(rows), workload.targets(rows)  # type: ignore[misc]
        self.trainers = {side.run: self._trainer(side) for side in SIDES}

    def _cap(self) -> int:
        """Between the accounted peaks of GPipe's fullest stage for M = 2 and M = 3."""
        side = Side("gpipe", False)
        return (max(self.peaks(side, 2)) + max(self.peaks(side, 3))) // 2

    def _trainer(self, side: Side) -> Trainer:
        # A trainer frees what other stages hold, so each gets a model of its own.
        graph = _graph(_workload(self.options))
        return Trainer(graph, self.plan(side, self.most), _adamw, device=_CPU)

    def plan(self, side: Side, micro_batches: int) -> Plan:
        """Two stages of one device each, policy A."""
        warmup = warmup_counts(2, micro_batches, "A")
        edges = (0, self.cut, self.profile.num_layers)
        return Plan(
            model=self.profile.model,
            global_batch_size=micro_batches * self.options.rows,
            micro_batch_size=self.options.rows,
            num_micro_batches=micro_batches,
            schedule=side.schedule,
            cluster=self.cluster,
            stages=tuple(
                StagePlan(
                    start=start,
                    stop=stop,
                    devices=(stage,),
                    warmup=warmup[stage],
                    recompute=self._ranges(start, stop) if side.recompute else False,
                )
                for stage, (start, stop) in enumerate(itertools.pairwise(edges))
            ),
        )

    def _ranges(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The stage's first blocks, each on its own; the rest keeps its activations."""
        blocks = [n for n in _blocks(self.profile) if start <= n < stop]
        return tuple((n, n + 1) for n in blocks[: self.options.recomputed])

    def peaks(self, side: Side, micro_batches: int) -> list[int]:
        """Accounted peak of each rank."""
        plan = self.plan(side, micro_batches)
        return [peak or 0 for peak in simulate(plan, self.profile, spans=False).peak_bytes]

    def cells(self) -> list[dict[str, Any]]:
        """Every side with the paper's M, and around the largest M that fits GPipe."""
        return [
            {
                "run": side.run,
                "count": count,
                "rows": self.options.rows,
                "accounted": self.peaks(side, count),
                **_simulated(simulate(self.plan(side, count), self.profile)),
            }
            for side in SIDES
            for count in sorted({*self.counts, *self._around_largest(side)})
        ]

    def _around_largest(self, side: Side) -> Iterator[int]:
        fits = [m for m in range(1, self.most + 1) if max(self.peaks(side, m)) <= self.cap]
        if side.schedule == "gpipe" and fits:
            yield max(fits)
            yield min(self.most, max(fits) + 1)

    def measure_memory(self, cells: list[dict[str, Any]]) -> None:
        """The meter's peak of each rank in a step of each cell, and whether the cell fits."""
        for trainer in self.trainers.values():
            trainer.step(*self._batch(2))  # makes the optimizer's state
        for cell in cells:
            trainer = self.trainers[cell["run"]]
            with trainer.measure_memory() as meter:
                trainer.step(*self._batch(cell["count"]))
            peaks: list[Any] = [None, None]
            dist.all_gather_object(peaks, meter.peak_bytes)
            cell["measured"] = peaks
            cell["fits"] = max(*cell["accounted"], *peaks) <= self.cap

    def _batch(self, micro_batches: int) -> tuple[Any, Any]:
        rows = micro_batches * self.options.rows
        return tuple(tensor[:rows] for tensor in self.inputs), self.targets[:rows]

    def step_of(self, cell: dict[str, Any]) -> Any:
        """What is timed."""
        trainer = self.trainers[cell["run"]]
        batch = self._batch(cell["count"])
        return lambda: trainer.step(*batch)

    def drawn(self, cells: list[dict[str, Any]]) -> dict[str, Any]:
        """A step of the second M without recompute, simulated and measured: the median of five."""
        found = {}
        for side in SIDES:
            if side.recompute:
                continue
            trainer, batch = self.trainers[side.run], self._batch(self.shown)
            steps = []
            for _ in range(5):
                dist.barrier()
                trainer.step(*batch)
                steps.append(trainer.timeline())
            median = statistics.median_low(step.step_seconds for step in steps)
            measured = next(step for step in steps if step.step_seconds == median)
            (peaks,) = (
                c["measured"] for c in cells if (c["run"], c["count"]) == (side.run, self.shown)
            )
            for step in (
                simulate(self.plan(side, self.shown), self.profile),
                measured.model_copy(update={"peak_bytes": tuple(peaks)}),
            ):
                found[f"{_TITLES[side.schedule]}, {step.source}"] = step.model_dump(mode="json")
        return found

    def figures(self) -> dict[str, Any]:
        """What was run, for the reader of the results."""
        layers, cut = self.profile.layers, self.cut
        link = self.cluster.machines[0].inside
        return {
            "parameters": self.parameters,
            "cap": self.cap,
            "speed_alone": self.speed_alone,
            "stage_seconds": [
                sum(layer.forward_seconds[0] + layer.backward_seconds[0] for layer in part)
                for part in (layers[:cut], layers[cut:])
            ],
            "message_seconds": link.latency
            + self.options.rows * self.options.length * self.options.width * 4 / link.bandwidth,
        }

    def close(self) -> None:
        for trainer in self.trainers.values():
            trainer.close()


_CPU = torch.device("cpu")
_TITLES = {"gpipe": "GPipe", "early-backward": "Early backward"}


def _speed_alone(chain: Chain, rounds: int = 6) -> float:
    """How much faster a process computes while the other waits: cores share caches and more."""
    world, rank = dist.get_world_size(), dist.get_rank()
    busy: list[float] = []
    alone: list[float] = []
    chain.run()
    for _ in range(rounds):
        for turn in (None, *range(world)):
            dist.barrier()
            if turn in (None, rank):
                found = chain.run()
                seconds = sum(found.forward_seconds) + sum(found.backward_seconds)
                (busy if turn is None else alone).append(seconds)
    dist.barrier()
    chain.clear_gradients()
    ratios: list[Any] = [None] * world
    dist.all_gather_object(ratios, statistics.median(busy) / statistics.median(alone))
    return statistics.mean(ratios)


def _simulated(timeline: Timeline) -> dict[str, float]:
    """The step, and the seconds of it in which only one of the two ranks computes."""
    kinds = (*COMPUTING, "optimizer")
    changes = [
        change
        for span in timeline.spans
        if span.kind in kinds
        for change in ((span.start, 1), (span.end, -1))
    ]
    alone, busy, since = 0.0, 0, 0.0
    for time, change in sorted(changes):
        alone += time - since if busy == 1 else 0.0
        busy, since = busy + change, time
    return {"simulated": timeline.step_seconds, "alone": alone}


def _workload(options: argparse.Namespace) -> Workload:
    torch.manual_seed(0)
    return make_workload(
        "bert-48",
        vocab=512,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        length=options.length,
        context=options.length,
    )


def _graph(workload: Workload, evaluation: bool = True) -> LayerGraph:
    return capture(
        workload.model,
        workload.inputs(4),
        loss=workload.loss,
        name=workload.name,
        evaluation=evaluation,
    )


def _blocks(profile: ModelProfile) -> list[int]:
    """The layers that are blocks, and may start a stage."""
    return [n for n, layer in enumerate(profile.layers) if layer.name.startswith("blocks.")]


def _balanced_cut(profile: ModelProfile) -> int:
    """The block before which the slower of the two stages takes least."""
    seconds = [layer.forward_seconds[0] + layer.backward_seconds[0] for layer in profile.layers]
    return min(_blocks(profile)[1:], key=lambda n: max(sum(seconds[:n]), sum(seconds[n:])))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)
