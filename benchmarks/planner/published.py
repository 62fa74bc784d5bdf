"""Our plans beside PipeDream's, the authors' released search's (HPGO) and the paper's own.

    python -m benchmarks.planner.published FOLDER [TABLE] [--hpgo PYTHON]

FOLDER holds the authors' text profiles (vgg-19-pbs-32.txt, bert-48-pbs-2.txt, xlnet-36-pbs-1.txt);
the Markdown table goes to TABLE, by default docs/planners-published.md. With --hpgo the released
package is run by an interpreter that has it (`pip install HPGO graphviz` in a Python 3.7); without,
its recorded answers count. The search runs without the baselines among its candidates. For the others the referee picks the number of micro-batches and the
warm-up; the paper's plans are also placed by whichever policy suits them best. Goal: nobody's plan
is shorter than ours on any profile, cluster and network model.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.planner.referee import (
    ALONE,
    SAME,
    Judged,
    baseline,
    best_of,
    judged,
    label,
    straight_by_blocks,
    two_stages,
)
from benchmarks.planner.released import Answer, Chain, ask, package_chain, record, recorded
from dapple.cluster import NETWORK_MODELS, preset
from dapple.costs import CostModel
from dapple.planner import search
from dapple.planner.hpgo import released_network, released_search
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.records import ModelProfile
from dapple.records.text_profile import load_text_profile
from dapple.schedule import warmup_counts
from dapple.simulator import step_seconds

PACKAGE = "HPGO 0.9.2"
CLUSTERS = ("config-a", "config-b", "config-c", "config-a:4x8")


@dataclass(frozen=True)
class Workload:
    """A profile of the authors with a global batch of the paper.

    Attributes:
        paper: per cluster the paper's plan: "DP", "straight", or replicas and first stage's last
            layer.
    """

    name: str
    rows: int
    batch: int
    paper: dict[str, str | tuple[int, int, str]]


_VGG: dict[str, str | tuple[int, int, str]] = {
    "config-a": "DP",
    "config-b": "DP",
    "config-c": (15, 1, "Conv2d_5_1"),
}
_BERT: dict[str, str | tuple[int, int, str]] = {
    "config-a": (8, 8, "layer_22"),
    "config-b": "straight",
    "config-c": "straight",
}
_XLNET: dict[str, str | tuple[int, int, str]] = {
    "config-a": (8, 8, "Layer_17"),
    "config-b": (8, 8, "Layer_17"),
    "config-c": "straight",
}
WORKLOADS = (
    Workload("vgg-19", 32, 1024, _VGG),
    Workload("vgg-19", 32, 2048, _VGG),
    Workload("bert-48", 2, 64, _BERT),
    Workload("xlnet-36", 1, 128, _XLNET),
)
"""Table 5 of the paper. VGG-19's split 13:6 counts layers with parameters; its plans are for 2048."""


@dataclass(frozen=True)
class Cell:
    """One workload on one cluster under one network model."""

    work: Workload
    cluster: str
    network: str
    profile: ModelProfile
    ours: Judged
    bound: float
    others: dict[str, Judged]
    why: str

    def ratio(self, name: str) -> float:
        """A planner's step over ours."""
        return self.others[name].seconds / self.ours.seconds


def fastest(problem: Problem, layouts: Iterable[Layout]) -> Judged:
    """The best of layouts of which some fit; without known memory all do."""
    found = best_of(problem, layouts)
    assert found is not None, "the profiles do not know memory"
    return found


def paper_layouts(problem: Problem, plan: str | tuple[int, int, str]) -> Iterator[Layout]:
    """The paper's plan for every number of micro-batches and every placement."""
    if plan == "DP":
        yield from baseline(problem, "dp")
    elif plan == "straight":
        yield from baseline(problem, "straight")
        blocks = [float("layer_" in layer.name.lower()) for layer in problem.profile.layers]
        yield from straight_by_blocks(problem, blocks)
    else:
        first, second, name = plan
        names = [layer.name for layer in problem.profile.layers]
        yield from two_stages(problem, (first, second), [names.index(str(name)) + 1])


def judge(
    profile: ModelProfile, work: Workload, cluster: str, network: str, package: Answer | None
) -> Cell:
    """Everybody's plan for one cell."""
    where = preset(cluster)
    result = search(profile, where, work.batch, network_model=network, options=ALONE)
    ours = judged(result.plan)
    predicted = result.plan.predicted
    assert predicted is not None
    assert predicted.lower_bound_seconds is not None
    problem = Problem(profile, where, work.batch, network_model=network)
    others = {name: fastest(problem, baseline(problem, name)) for name in ("pipedream", "hpgo")}
    if package is not None:
        others[PACKAGE] = fastest(problem, package.layouts(problem))
    cell = Cell(work, cluster, network, profile, ours, predicted.lower_bound_seconds, others, "")
    plan = work.paper.get(cluster)
    if plan is None:
        return cell
    others["paper"] = fastest(problem, paper_layouts(problem, plan))
    if others["paper"].shape == ours.shape:
        return cell
    return replace(cell, why=_why(cell, problem, plan))


def _why(cell: Cell, problem: Problem, plan: str | tuple[int, int, str]) -> str:
    """Why the search leaves the paper's plan, by simulating what lies between the two."""
    ours, paper = cell.ours, cell.others["paper"]
    if cell.ratio("paper") < 1 - SAME:
        return f"the search misses the paper's plan, which takes {cell.ratio('paper'):.3f}x"
    if plan == "DP":
        layers = [n.model_copy(update={"parameter_bytes": 0}) for n in problem.profile.layers]
        freed = problem.profile.model_copy(update={"layers": tuple(layers), "tied": ()})
        model = CostModel(freed, problem.cluster, problem.model.network.model)
        batch, count = problem.global_batch_size, paper.micro_batches
        waits = paper.seconds - step_seconds(model, paper.stages, batch, count)
        return (
            f"the last backward hides all but {_ms(waits)} ms of DP's AllReduce, which is in its "
            f"{_ms(paper.seconds)}; ours takes {_ms(ours.seconds)}"
        )
    parts = []
    if len(ours.stages) != len(paper.stages):
        more = "more" if len(ours.stages) > len(paper.stages) else "fewer"
        parts.append(f"{more} stages ({len(ours.stages)} for {len(paper.stages)})")
    if plan != "straight":
        cuts = range(1, problem.num_layers)
        moved = fastest(problem, two_stages(problem, (int(plan[0]), int(plan[1])), cuts))
        if moved.seconds < ours.seconds * (1 - SAME):
            cell.others["the paper's replicas, best cut"] = moved
        name = cell.profile.layers[moved.stages[0].stop - 1].name
        parts.append(
            f"with the paper's replicas the best cut, after {name}, and M = {moved.micro_batches} "
            f"come to {moved.seconds / ours.seconds:.3f}x"
            f"{', which the search misses' if moved.seconds < ours.seconds * (1 - SAME) else ''}"
        )
    else:
        width = max(stage.replicas for stage in ours.stages)
        if width > 1:
            parts.append(
                f"up to {width} replicas a stage, as rows are split without loss in a profile "
                "of one batch size, and fewer stages fill and drain sooner"
            )
    counts = warmup_counts(len(ours.stages), ours.micro_batches, "A")
    if any(stage.warmup > k for stage, k in zip(ours.stages, counts, strict=True)):
        capped = tuple(
            stage.model_copy(update={"warmup": min(stage.warmup, k)})
            for stage, k in zip(ours.stages, counts, strict=True)
        )
        loss = problem.step_seconds(capped, ours.micro_batches) / ours.seconds
        parts.append(
            f"K_i above policy A (memory is unchecked in this profile), without which our plan "
            f"takes {loss:.3f}x"
        )
    return "; ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def table(cells: list[Cell]) -> str:
    """The page."""
    out = [
        "# Our plans beside published ones",
        "",
        *textwrap.wrap(
            "Written by `python -m benchmarks.planner.published FOLDER`, FOLDER holding the text "
            "profiles that DAPPLE's authors published. One referee judges everybody: our simulator "
            "(docs/semantics.md), with the network model named above each table. The search ran "
            "*without the baselines among its candidates*, the number of micro-batches M was free, "
            "and no other planner's M or warm-up is fixed: the referee took the best. The "
            "paper's plans were also placed by whichever policy suited them best.",
            100,
        ),
        "",
        *textwrap.wrap(
            "**P:Q after L**: P and Q replicas, cut behind layer L; **2^3**: three stages of two "
            "replicas. **x**: that plan's step over ours. **gap**: our step over the lower bound "
            "on any plan, less 1. config-a is 2 machines of 8, config-a:4x8 four, config-b and "
            "config-c 16 of 1. The paper names no plan for 4x8, and for VGG-19 those for 2048.",
            100,
        ),
        "",
        *textwrap.wrap(
            "These profiles say nothing of saved bytes and hold one batch size: memory is "
            "unchecked, and times are in proportion to rows, however few.",
            100,
        ),
        "",
        *_worst(cells),
    ]
    for network in NETWORK_MODELS:
        rows = [cell for cell in cells if cell.network == network]
        out += ["", f"## Network model `{network}`", ""]
        out += ["| profile, batch | cluster | ours | M | step, ms | gap | PipeDream | x "]
        out[-1] += "| HPGO | x | paper | x |"
        out += ["|---|---|---|--:|--:|--:|---|--:|---|--:|---|--:|"]
        out += [_row(cell) for cell in rows]
        out += ["", "Where the search leaves the paper's plan:", ""]
        for cell in rows:
            if cell.why:
                line = f"{cell.work.name}, {cell.work.batch}, {cell.cluster}: {cell.why}."
                out += textwrap.wrap(
                    line, 98, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
                )
        same = [
            f"{c.work.name} {c.work.batch} on {c.cluster}"
            for c in rows
            if "paper" in c.others and not c.why
        ]
        if same:
            out += ["", *textwrap.wrap(f"The paper's cuts and replicas: {', '.join(same)}.", 98)]
    return "\n".join(out) + "\n"


Key = tuple[str, int, tuple[int, ...]]
"""Model, global batch and machines."""


def package_table(
    cells: list[Cell], answers: dict[Key, Answer], chains: dict[tuple[str, int], Chain]
) -> str:
    """The package's own plans, and whether our `hpgo` comes to the same."""
    out = ["", "## HPGO 0.9.2 itself", ""]
    out += textwrap.wrap(
        "The package, run by Python 3.7 (`--hpgo PYTHON`), and `dapple.planner.hpgo` told the same "
        "chain and network: score is the speed-up over one device that each expects. Our import "
        "of a profile differs in two respects, so that the HPGO columns above need not "
        "show these plans: masks and positions do not travel with every cut, and leading "
        "inputs take no time; and there the network is the cluster's, not the package's built-in "
        "one, and the plans without its slip count too. x is again its plan's step over ours. "
        "Questions that it has not answered are left out: on four machines of 8 it stops with a panic "
        "for VGG-19, which has fewer layers than devices, and thinks for long about the others.",
        100,
    )
    out += ["", "| profile, batch | machines | package | score | ours by its rules | score |"]
    out[-1] += " x `shared` | x `paper` | its time, s |"
    out += ["|---|---|---|--:|---|--:|---|---|--:|"]
    for (model, batch, machines), answer in answers.items():
        mine = [
            cell
            for cell in cells
            if (cell.work.name, cell.work.batch) == (model, batch) and PACKAGE in cell.others
            if preset(cell.cluster).machine_sizes() == machines
        ]
        chain, profile = chains[model, batch], mine[0].profile
        found = released_search(chain.costs, released_network(preset(mine[0].cluster)))
        last = tuple(chain.names[cut - 1] for cut in found.cuts[1:-1])
        same = (last, found.devices) == (answer.last, answer.devices)
        plan = label(mine[0].others[PACKAGE], profile)
        columns = [f"{model}, {batch}", f"{len(machines)} of {machines[0]}", plan]
        columns += [f"{answer.score:.6f}", "the same" if same else "another"]
        columns += [f"{chain.costs.seconds[-1] / found.seconds:.6f}"]
        for network in NETWORK_MODELS:
            ratios = [(c.cluster, c.ratio(PACKAGE)) for c in mine if c.network == network]
            columns.append(", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios))
        out.append(f"| {' | '.join([*columns, f'{answer.seconds:.0f}'])} |")
    return "\n".join(out) + "\n"


def _worst(cells: list[Cell]) -> Iterator[str]:
    lost = list(losses(cells))
    if lost:
        yield "**Ours is slower than another plan:**"
        yield ""
        yield from (f"- {line}" for line in lost)
        return
    yield "Ours is nowhere slower than another plan. How much longer the others take:"
    yield ""
    for name, shown in (("pipedream", "PipeDream"), ("hpgo", "HPGO"), ("paper", "the paper")):
        ratios = [cell.ratio(name) for cell in cells if name in cell.others]
        yield f"- {shown}: mean {np.mean(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"


def _row(cell: Cell) -> str:
    columns = [f"{cell.work.name}, {cell.work.batch}", cell.cluster]
    columns += [label(cell.ours, cell.profile), f"{cell.ours.micro_batches}"]
    columns += [f"{cell.ours.seconds * 1e3:.1f}", f"{cell.ours.seconds / cell.bound - 1:.1%}"]
    for name in ("pipedream", "hpgo", "paper"):
        if name in cell.others:
            lost = cell.ratio(name) < 1 - SAME
            ratio = f"{cell.ratio(name):.3f}"
            other = cell.others[name]
            columns += [f"{label(other, cell.profile)}, M {other.micro_batches}"]
            columns += [f"**{cell.ratio(name):.5f}**" if lost else ratio]
        else:
            columns += ["", ""]
    return f"| {' | '.join(columns)} |"


def losses(cells: Iterable[Cell]) -> Iterator[str]:
    """Where another plan is shorter than ours."""
    for cell in cells:
        for name, other in cell.others.items():
            if cell.ratio(name) < 1 - SAME:
                yield (
                    f"{cell.work.name}, {cell.work.batch}, {cell.cluster}, {cell.network}: {name} "
                    f"{other.seconds * 1e3:.4f} ms, ours {cell.ours.seconds * 1e3:.4f} ms "
                    f"({cell.ratio(name):.6f})"
                )


def main(folder: Path, page: Path, python: str | None) -> None:
    """Judge every cell, write the page, and fail if another plan is shorter."""
    if python is not None:
        record(list(_ask_all(folder, python)))
    answers = {(a.model, a.batch, a.machines): a for a in recorded()}
    cells, chains = [], {}
    for work in WORKLOADS:
        path = folder / f"{work.name}-pbs-{work.rows}.txt"
        profile = load_text_profile(path, work.rows)
        chains[work.name, work.batch] = package_chain(path, work.rows, work.batch)
        for cluster, network in itertools.product(CLUSTERS, NETWORK_MODELS):
            begun = time.perf_counter()
            package = answers.get((work.name, work.batch, preset(cluster).machine_sizes()))
            cells.append(judge(profile, work, cluster, network, package))
            print(f"{time.perf_counter() - begun:5.1f} s  {_row(cells[-1])}", flush=True)
    page.write_text(table(cells) + package_table(cells, answers, chains), encoding="utf-8")
    lost = list(losses(cells))
    assert not lost, "\n".join(["ours is slower:", *lost])


def _ask_all(folder: Path, python: str) -> Iterator[Answer]:
    machines = dict.fromkeys(preset(cluster).machine_sizes() for cluster in CLUSTERS)
    for work, sizes in itertools.product(WORKLOADS, machines):
        path = folder / f"{work.name}-pbs-{work.rows}.txt"
        try:
            answer = ask(python, path, work.rows, work.batch, sizes)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            # It stops with a panic where a model has fewer layers than there are devices.
            print(f"{work.name}, {work.batch} on {sizes}: no answer: {error}", flush=True)
            continue
        print(answer, flush=True)
        yield answer


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    default = Path(__file__).parents[2] / "docs" / "planners-published.md"
    parser.add_argument("page", type=Path, nargs="?", default=default)
    parser.add_argument("--hpgo", help="a Python that has HPGO 0.9.2")
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    main(given.folder, given.page, given.hpgo)
