"""Strong scaling on A, and the largest BERT that fits, with recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.paper.facts import BATCHES, LARGEST_BERT, MODELS
from benchmarks.paper.hybrid import DataParallel
from benchmarks.paper.markdown import bullets, join, paragraph, table
from benchmarks.paper.questions import Answers, Case, OneDevice, Ours, Question, profile_of
from dapple.cluster import preset
from dapple.planner.balance import balanced_bounds
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.records import ModelProfile, StagePlan
from dapple.simulator import predict

SHOWN = tuple(model for model in MODELS if model != "resnet-50")
DEVICES = {
    2: "config-a:1x2",
    4: "config-a:1x4",
    8: "config-a:1x8",
    12: "config-a:2x6",
    16: "config-a",
}
ROWS = 2
PER_DEVICE = 8
"""Rows of a micro-batch, and micro-batches for each device, of the largest BERTs."""
_STATE = 16


@dataclass(frozen=True)
class Point:
    """Speedups over one device; None: does not fit."""

    devices: int
    ours: float | None
    overlap: float | None


@dataclass(frozen=True)
class Largest:
    """The largest BERT on some devices: blocks, parameters, and the share of time that they compute."""

    blocks: int
    parameters: int
    utilisation: float
    peak: int


@dataclass(frozen=True)
class LargestBert(Question[Largest]):
    """The most blocks whose straight pipeline keeps policy A's micro-batches in 16 GB each."""

    devices: int

    def answer(self) -> Largest:
        """Double, then halve the interval: more blocks never need less memory."""
        low, high = self.devices, 2 * self.devices
        while self.fitting(high) is not None:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fitting(middle) is not None else (low, middle)
        found = self.fitting(low)
        assert found is not None
        problem, layout, stages = found
        predicted = predict(problem.plan(layout, stages, "straight"), problem.profile)
        return Largest(
            low,
            sum(layer.parameter_bytes for layer in problem.profile.layers) // 4,
            1 - predicted.bubble_fraction,
            max(stage.peak_bytes or 0 for stage in predicted.stages),
        )

    def fitting(self, blocks: int) -> tuple[Problem, Layout, tuple[StagePlan, ...]] | None:
        """The pipeline of so many blocks, cut evenly by parameters, if it fits."""
        profile, count = bert(blocks), PER_DEVICE * self.devices
        problem = Problem(
            profile,
            preset(f"config-a:1x{self.devices}"),
            ROWS * count,
            micro_batch_size=ROWS,
            warmup="A",
            recompute=True,
        )
        bounds = balanced_bounds([float(n.parameter_bytes) for n in profile.layers], self.devices)
        devices = tuple((device,) for device in range(self.devices))
        layout = Layout(bounds, devices, count, recompute=True)
        stages = problem.fit(layout, "straight")
        if isinstance(stages, Refusal):
            return None
        wanted = problem.wanted_warmup(layout)
        enough = all(s.warmup == want for s, want in zip(stages, wanted, strict=True))
        return (problem, layout, stages) if enough else None


def bert(blocks: int) -> ModelProfile:
    """BERT-48's profile with another number of blocks, which are all alike."""
    profile = profile_of("bert-48")
    first, block, last = profile.layers[0], profile.layers[1], profile.layers[-1]
    between = profile.tensors[0]
    layers = [first, *[block] * blocks, last]
    named = [n.model_copy(update={"name": f"layers.{i}"}) for i, n in enumerate(layers)]
    tensors = [
        between.model_copy(update={"name": f"t{i}", "producer": i, "consumers": (i + 1,)})
        for i in range(blocks + 1)
    ]
    update = {"model": f"bert-{blocks}", "layers": tuple(named), "tensors": tuple(tensors)}
    return profile.model_copy(update={**update, "model_fingerprint": None})


def case(model: str, devices: int) -> Case:
    """A model's batch on so many devices of A."""
    return Case(model, DEVICES[devices], BATCHES[model])


def questions() -> Iterator[Question[object]]:
    """Every number of devices, and the largest BERTs."""
    for model, devices in itertools.product(SHOWN, DEVICES):
        yield Ours(case(model, devices))
        yield DataParallel(case(model, devices))
        yield OneDevice(model, BATCHES[model])
    yield from map(LargestBert, LARGEST_BERT)


def points(answers: Answers, model: str) -> list[Point]:
    """One model's curve."""
    one, found = answers[OneDevice(model, BATCHES[model])], []
    for devices in DEVICES:
        where = case(model, devices)
        ours, parallel = answers[Ours(where)], answers[DataParallel(where)]
        found.append(
            Point(
                devices,
                one / ours.seconds if ours else None,
                one / parallel.seconds if parallel else None,
            )
        )
    return found


def section(answers: Answers) -> str:
    """Both tables."""
    rows = []
    for model in SHOWN:
        row = [f"{model}, {BATCHES[model]}"]
        for point in points(answers, model):
            row.append(f"{_shown(point.ours)} ({_shown(point.overlap)})")
        rows.append(row)
    largest = []
    for devices, (blocks, parameters, busy) in LARGEST_BERT.items():
        ours = answers[LargestBert(devices)]
        row = [f"{devices}", f"{blocks}", f"{parameters / 1e9:.2f} G", f"{busy:.0%}"]
        row += [f"{ours.blocks}", f"{ours.parameters / 1e9:.2f} G", f"{ours.utilisation:.0%}"]
        largest.append([*row, f"{ours.peak / 1e9:.1f} GB"])
    state = [_STATE * answers[LargestBert(n)].parameters / n / 1e9 for n in LARGEST_BERT]
    return join(
        "## Strong scaling on A",
        paragraph(
            """*Simulated.* Speedup over one device whose memory holds everything, of our plan and in
            brackets of data parallelism with overlap; a dash: it does not fit. Up to 8 devices are one
            machine, 12 are two machines of six. (The paper has a figure without numbers.)"""
        ),
        table(("model, batch", *(f"{devices} devices:" for devices in DEVICES)), rows),
        "![speedup over devices](images/paper-scaling.svg)",
        "## The largest BERT",
        paragraph(
            f"""*Simulated.* The most blocks of 1024 that fit 16 GB a device with recomputation, in a
            straight pipeline on one machine of A: micro-batches of {ROWS}, {PER_DEVICE} for each device,
            {_STATE} bytes a parameter; utilisation is the share of time that devices compute."""
        ),
        table(
            (
                "devices:",
                "the paper, blocks:",
                "parameters:",
                "utilisation:",
                "ours, blocks:",
                "parameters:",
                "utilisation:",
                "fullest device:",
            ),
            largest,
        ),
        bullets(
            [
                f"The paper's largest models take {_STATE} x 640 M = 10.2 GB of state on one device and "
                "11.2, 10.8 and 11.0 on each of 2, 4 and 8; 6 to 7 GB of the 16 GiB were left for "
                f"activations and the framework. Ours take {min(state):.1f} to {max(state):.1f} GB of state, "
                "since our accounting knows no framework: the rest is for what a stage keeps of one "
                "micro-batch while it runs again, and for the inputs of the others.",
                "The paper does not give its number of micro-batches, on which the bubble depends. One "
                "device has no bubble: its 93 % must be what a device waits for its program, which we "
                "do not model.",
            ]
        ),
    )


def _shown(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.1f}"
