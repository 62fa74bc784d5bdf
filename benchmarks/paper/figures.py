"""The paper's schedule figures, drawn by dapple from its own schedules and simulator.

    python -m benchmarks.paper.figures

Writes docs/images/gpipe-early-backward.svg (GPipe against early backward, with what they hold in
memory) and docs/images/warmup-policies.svg (policies A and B where transfers take as long as
computing). Needs matplotlib, not torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.paper.markdown import join, paragraph
from benchmarks.paper.questions import Answers, Question
from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.records import LayerProfile, ModelProfile, Plan, StagePlan, TensorProfile, Timeline
from dapple.reporting import save_picture
from dapple.schedule import warmup_counts
from dapple.simulator import simulate
from dapple.units import format_seconds

FOLDER = Path(__file__).parents[2] / "docs" / "images"
FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
_SAVED, _BOUNDARY, _PARAMETERS = 200_000_000, 25_000_000, 100_000_000


def gpipe_and_early_backward() -> dict[str, Timeline]:
    """Three stages and seven micro-batches: the same bubble, but another peak of memory."""
    titles = {"gpipe": "GPipe", "early-backward": "Early backward (DAPPLE)"}
    return {
        title: pipeline(3, 7, schedule=schedule, transfer_seconds=1e-6)
        for schedule, title in titles.items()
    }


def warmup_policies() -> dict[str, Timeline]:
    """Three stages whose transfers take as long as a forward: policy A waits, B does not."""
    return {
        f"Policy {policy}: K = {', '.join(map(str, warmup_counts(3, 10, policy)))}": pipeline(
            3, 10, policy=policy, transfer_seconds=FORWARD_SECONDS
        )
        for policy in "AB"
    }


FIGURES = {
    "gpipe-early-backward": gpipe_and_early_backward,
    "warmup-policies": warmup_policies,
}


def pipeline(
    num_stages: int,
    micro_batches: int,
    *,
    transfer_seconds: float,
    schedule: str = "early-backward",
    policy: str = "A",
) -> Timeline:
    """The step of equal stages, one device each, whose backward takes twice the forward.

    Args:
        num_stages: S.
        micro_batches: M.
        transfer_seconds: for what one stage hands to the next, and for its gradient.
        schedule: how it is run.
        policy: warm-up policy of early backward.
    """
    layers = tuple(
        LayerProfile(
            name=f"layers.{number}",
            forward_seconds=(FORWARD_SECONDS,),
            backward_seconds=(BACKWARD_SECONDS,),
            parameter_bytes=_PARAMETERS,
            saved_bytes=(_SAVED,),
        )
        for number in range(num_stages)
    )
    tensors = tuple(
        TensorProfile(
            name=f"t{n}", producer=n, consumers=(n + 1,), bytes_per_sample=float(_BOUNDARY)
        )
        for n in range(num_stages - 1)
    )
    profile = ModelProfile(
        model="pipeline", device="any", batch_sizes=(1,), layers=layers, tensors=tensors
    )
    link = Link(bandwidth=_BOUNDARY / transfer_seconds)
    kind = DeviceKind(name="any", memory="16 GiB")  # type: ignore[arg-type]  # read from text
    plan = Plan(
        model="pipeline",
        global_batch_size=micro_batches,
        micro_batch_size=1,
        num_micro_batches=micro_batches,
        schedule=schedule,
        cluster=Cluster(
            name="any", machines=(Machines(devices=num_stages, kind=kind, inside=link),)
        ),
        stages=tuple(
            StagePlan(start=number, stop=number + 1, devices=(number,), warmup=warmup)
            for number, warmup in enumerate(warmup_counts(num_stages, micro_batches, policy))
        ),
    )
    return simulate(plan, profile)


def questions() -> Iterable[Question[Any]]:
    """None: a figure takes no time to simulate."""
    return ()


def section(answers: Answers) -> str:
    """The figures with what they show."""
    gpipe, early = gpipe_and_early_backward().values()
    policy_a, policy_b = warmup_policies().values()
    return join(
        "## The figures of schedules",
        paragraph(
            """*Simulated* and drawn by dapple (`dapple simulate --picture`,
            [schedules.md](schedules.md)), a backward taking twice a forward."""
        ),
        paragraph(
            f"""GPipe and early backward, three stages and seven micro-batches, without transfers. The
            step is the same ({_step(gpipe)} and {_step(early)}), but GPipe holds {gpipe.in_flight[0]}
            micro-batches on its first stage and early backward {early.in_flight[0]}:"""
        ),
        "![GPipe and early backward](images/gpipe-early-backward.svg)",
        paragraph(
            f"""Policies A and B, three stages and ten micro-batches, with transfers as long as a forward:
            {_step(policy_a)} and {_step(policy_b)}. With A stages wait for gradients to come back; with
            B they have work until then:"""
        ),
        "![Warm-up policies A and B](images/warmup-policies.svg)",
    )


def _step(timeline: Timeline) -> str:
    return format_seconds(timeline.step_seconds)


def draw_all(folder: Path = FOLDER) -> list[Path]:
    """Write every figure as SVG; their paths."""
    return draw(folder, {name: make() for name, make in FIGURES.items()})


def draw(folder: Path, figures: Mapping[str, Mapping[str, Timeline]]) -> list[Path]:
    """Write the figures as SVG; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg" for name in figures]
    for path, steps in zip(paths, figures.values(), strict=True):
        save_picture(path, steps)
    return paths


def main() -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    for path in draw_all(options.folder):
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
