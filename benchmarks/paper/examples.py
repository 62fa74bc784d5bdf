"""The paper's worked examples: an uneven split, and where six more devices are taken."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.paper.markdown import bullets, join
from benchmarks.paper.questions import Answers, Question
from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.costs import CostModel
from dapple.planner.placement import place
from dapple.records import LayerProfile, ModelProfile, StagePlan
from dapple.simulator import step_seconds

TAKEN = (0, 1, 2, 8, 9, 10, 11, 12)


def six_layers() -> ModelProfile:
    """A model of four units for each row, F and B alike, in six layers without activations."""
    layer = {"forward_seconds": (1 / 3,), "backward_seconds": (1 / 3,)}
    layers = tuple(LayerProfile(name=f"layers.{n}", **layer) for n in range(6))
    return ModelProfile(model="six", device="none", batch_sizes=(1,), layers=layers)


def two_devices() -> Cluster:
    """Two devices with a link that costs nothing."""
    kind = DeviceKind(name="none", memory=2**40)
    return Cluster(name="two", machines=(Machines(devices=2, kind=kind, inside=Link(bandwidth=1)),))


def split_units(first: int) -> float:
    """The step of two stages, the first of so many layers, with two micro-batches of a row."""
    stages = [
        StagePlan(start=0, stop=first, devices=(0,), warmup=2),
        StagePlan(start=first, stop=6, devices=(1,), warmup=1),
    ]
    return step_seconds(CostModel(six_layers(), two_devices(), "paper"), stages, 2, 2)


def questions() -> Iterator[Question[object]]:
    """None: these take no time."""
    yield from ()


def section(answers: Answers) -> str:
    """Both examples."""
    del answers
    taken = {
        policy: place(policy, (8, 8, 8), TAKEN, 6) for policy in ("fresh", "append", "scatter")
    }
    return join(
        "## Worked examples",
        bullets(
            [
                f"Uneven split, *simulated*: two stages, two micro-batches, four units of work each; cut "
                f"evenly {split_units(3):.2f} units, cut 4:2 {split_units(4):.2f} (the paper: 6 and 5.33). "
                "`tests/planner/test_paper_examples.py`.",
                "Placement: three machines of eight, 0-2 and 8-12 taken, six wanted: "
                + ", ".join(f"{policy} {_ranges(devices)}" for policy, devices in taken.items())
                + " (the paper: 16-21; 3-7 and 13; 3, 4, 5 and 13, 14, 15). "
                "`tests/planner/test_placement.py`.",
            ]
        ),
    )


def _ranges(devices: tuple[int, ...] | None) -> str:
    """Device numbers with runs drawn together, such as 3-7 13."""
    runs: list[list[int]] = []
    for device in devices or ():
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
