"""The table of plans: what our planner picks on A, B and C beside the paper's plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.paper.facts import (
    BATCHES,
    CLUSTERS,
    COUNTED,
    MODELS,
    PLANS,
    REFERENCE_GAINS,
    PaperPlan,
)
from benchmarks.paper.markdown import bullets, join, paragraph, table
from benchmarks.paper.questions import Answers, Case, Ours, Question, profile_of
from benchmarks.planner.referee import (
    SAME,
    Judged,
    baseline,
    best_of,
    label,
    straight_by_blocks,
    two_stages,
)
from dapple.cluster import NETWORK_MODELS
from dapple.costs import CostModel
from dapple.planner.problem import Layout, Problem
from dapple.records import StagePlan
from dapple.units import format_bytes

_MUCH_LESS, _LONGER = 0.7, 1.05
_REPEATED = ("blocks.", "cells.", "encoder.", "decoder.", "both_ways", "first", "features.")


@dataclass(frozen=True)
class Theirs(Question[tuple[Judged, bool]]):
    """The paper's plan at its best M, warm-up and placement, and whether it fits 16 GB."""

    case: Case

    def answer(self) -> tuple[Judged, bool]:
        """Judge it; where it does not fit, as if it did."""
        for memory in (True, False):
            problem = self.case.problem(memory=memory)
            found = best_of(problem, paper_layouts(problem, self.case))
            if found is not None:
                return found, memory
        raise AssertionError("every plan fits unlimited memory")


@dataclass(frozen=True)
class BestCut(Question[Judged | None]):
    """The paper's two stages of P and Q replicas with the cut that suits our profile best."""

    case: Case

    def answer(self) -> Judged | None:
        """Try every cut."""
        problem = self.case.problem()
        cuts = range(1, problem.num_layers)
        return best_of(problem, two_stages(problem, paper_plan(self.case).replicas, cuts))


def paper_plan(case: Case) -> PaperPlan:
    """What the paper's table says for a case."""
    return PLANS[case.model][CLUSTERS.index(case.cluster)]


def paper_layouts(problem: Problem, case: Case) -> Iterator[Layout]:
    """The paper's plan for every number of micro-batches and every placement."""
    plan = paper_plan(case)
    names = [layer.name for layer in problem.profile.layers]
    if plan.shape == "DP":
        yield from baseline(problem, "dp")
    elif plan.shape == "straight":
        yield from baseline(problem, "straight")
        blocks = [float(name.startswith(_REPEATED)) for name in names]
        yield from straight_by_blocks(problem, blocks)
    else:
        yield from two_stages(problem, plan.replicas, [names.index(n) + 1 for n in plan.behind])


def cases(network: str) -> list[Case]:
    """The table's 18 cells."""
    return [
        Case(model, cluster, BATCHES[model], network)
        for model, cluster in itertools.product(MODELS, CLUSTERS)
    ]


def questions() -> Iterator[Question[object]]:
    """Ours and theirs in every cell, and the best cut where the paper has two stages."""
    for case in itertools.chain.from_iterable(map(cases, NETWORK_MODELS)):
        yield Ours(case)
        yield Theirs(case)
        if ":" in paper_plan(case).shape:
            yield BestCut(case)


def section(answers: Answers) -> str:
    """The tables of both networks, and a sentence on every difference."""
    parts = [
        "## Plans on A, B and C",
        paragraph(
            """*Simulated.* Our search ran without the paper's plans, and without any other planner's,
            among its candidates. The paper's plan is given the micro-batches, warm-up and placement
            that suit it best under the same referee. **x** is its step over ours, so 1.10 means that
            the paper's plan takes 10 % longer. **P:Q after L**: P and Q replicas, cut behind layer L;
            **2^3**: three stages of two replicas. Times of all tables are seconds of our V100
            profiles, made from shapes ([zoo.md](zoo.md))."""
        ),
        "The paper's cuts count layers of its own. Ours are behind the same ones:",
        bullets(f"{model}: {counted}." for model, counted in COUNTED.items()),
        verdict(answers),
    ]
    for network in NETWORK_MODELS:
        rows = [_row(answers, case) for case in cases(network)]
        header = ("model, batch", "cluster", "the paper's plan", "M:", "step, ms:", "ours", "M:")
        header += ("step, ms:", "x:", "reference model:")
        parts += [f"### Network model `{network}`", table(header, rows)]
        parts += ["Where ours is another plan:", bullets(_differences(answers, network))]
    return join(*parts)


def verdict(answers: Answers) -> str:
    """Whether ours is slower anywhere."""
    lost = []
    for case in itertools.chain.from_iterable(map(cases, NETWORK_MODELS)):
        ratio = _ratio(answers, case)
        if ratio is None or (ratio < 1 - SAME and answers[Theirs(case)][1]):
            lost.append(f"{case.model} on {case.cluster}, `{case.network}`: {ratio}")
    if lost:
        return join("**Ours is slower than the paper's plan:**", bullets(lost))
    ratios = [_ratio(answers, case) or 1.0 for network in NETWORK_MODELS for case in cases(network)]
    return paragraph(
        f"Ours is slower in none of the {len(ratios)} cells; the paper's plan takes up to "
        f"{max(ratios):.2f}x as long, on average {sum(ratios) / len(ratios):.3f}x."
    )


def _ratio(answers: Answers, case: Case) -> float | None:
    ours = answers[Ours(case)]
    return None if ours is None else answers[Theirs(case)][0].seconds / ours.seconds


def _row(answers: Answers, case: Case) -> list[str]:
    profile, ours, (theirs, fits) = (
        profile_of(case.model),
        answers[Ours(case)],
        answers[Theirs(case)],
    )
    ratio = _ratio(answers, case)
    row = [f"{case.model}, {case.batch}", case.cluster[-1].upper()]
    row += [label(theirs, profile) + ("" if fits else " (does not fit)")]
    row += [f"{theirs.micro_batches}", f"{theirs.seconds * 1e3:.1f}"]
    if ours is None:
        return [*row, "nothing fits", "", "", "", ""]
    row += [label(ours, profile), f"{ours.micro_batches}", f"{ours.seconds * 1e3:.1f}"]
    slower = ratio is not None and ratio < 1 - SAME and fits
    row += [f"**{ratio:.4f}**" if slower else f"{ratio:.3f}"]
    return [*row, REFERENCE_GAINS.get((case.model, case.cluster), "")]


def _differences(answers: Answers, network: str) -> Iterator[str]:
    for case in cases(network):
        ours, (theirs, fits) = answers[Ours(case)], answers[Theirs(case)]
        if ours is not None and (ours.shape != theirs.shape or not fits):
            yield f"{case.model} on {case.cluster[-1].upper()}: {_why(answers, case)}."


def _why(answers: Answers, case: Case) -> str:
    """One sentence on a cell whose two plans differ, from what was simulated between them."""
    ours, (theirs, fits) = answers[Ours(case)], answers[Theirs(case)]
    assert ours is not None
    parts, plan, profile = [], paper_plan(case), case.profile
    if not fits:
        parts.append("the paper's plan needs more than 16 GB here; its step is without that limit")
    if len(ours.stages) == 1:
        parts.append("one stage has no bubble, and its last backward hides most of the AllReduce")
    elif ours.replicas == theirs.replicas:
        name = profile.layers[ours.stages[0].stop - 1].name
        parts.append(f"the same replicas, cut after {name}, {_why_there(case, ours, theirs)}")
    elif plan.shape == "straight":
        parts.append(
            f"{len(ours.stages)} stages for 16 fill and drain sooner and leave fewer and larger "
            "micro-batches, at which a device computes faster"
        )
    else:
        moved = answers[BestCut(case)]
        best = (
            "does not fit anywhere"
            if moved is None
            else (f"takes {moved.seconds / ours.seconds:.3f}x even where it is cut best")
        )
        parts.append(f"{plan.shape} {best}; {len(ours.stages)} stages sum fewer gradients each")
    return "; ".join(parts)


def _why_there(case: Case, ours: Judged, theirs: Judged) -> str:
    """What our cut of two stages has over the paper's."""
    model = case.problem().model
    moved = [_bytes_per_row(model, plan.stages) for plan in (ours, theirs)]
    if moved[0] < _MUCH_LESS * moved[1]:
        return f"where a row hands over {format_bytes(moved[0])} and not {format_bytes(moved[1])}"
    rows = case.batch / ours.micro_batches
    first, second = (
        sum(model.stage_seconds(s.start, s.stop, rows / s.replicas)) for s in ours.stages
    )
    if first > second * _LONGER:
        return (
            f"which makes the first stage {first / second:.2f} times as long as the second: of "
            f"{ours.micro_batches} micro-batches the second stage waits for the first one and the "
            "first stage for the last one (the uneven split below)"
        )
    return "which balances the stages of our profile"


def _bytes_per_row(model: CostModel, stages: Sequence[StagePlan]) -> int:
    first, second = stages
    crossing = model.crossing((first.start, first.stop), (second.start, second.stop))
    assert crossing is not None
    return round(crossing.bytes_per_row)
