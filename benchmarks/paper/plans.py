"""The table of plans: what our planner picks on A, B and C beside the paper's plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.paper.differences import sentence
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
from benchmarks.paper.questions import Answers, Case, OneDevice, Ours, Question, profile_of
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
from dapple.planner.certificate import lower_bound
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem

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


@dataclass(frozen=True)
class Bound(Question[float]):
    """Seconds below which no plan's step can lie: the planner's certificate."""

    case: Case

    def answer(self) -> float:
        """Certify, from the step of a single device downwards."""
        problem, one = self.case.problem(), OneDevice(self.case.model, self.case.batch)
        return lower_bound(problem, one.answer(), problem.micro_batch_counts[0])


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
        yield Bound(case)
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
            the paper's plan takes 10 % longer; **gap** is ours over a lower bound on any plan within
            memory, less 1 ([planner.md](planner.md)). **P:Q after L**: P and Q replicas, cut behind layer L;
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
        header += ("step, ms:", "gap:", "x:", "reference model:")
        parts += [f"### Network model `{network}`", table(header, rows)]
        parts += ["Where ours is another plan:", bullets(_others(answers, network))]
    return join(*parts)


def _others(answers: Answers, network: str) -> Iterator[str]:
    """A sentence on each cell whose two plans differ."""
    for case in cases(network):
        ours, (theirs, fits) = answers[Ours(case)], answers[Theirs(case)]
        if ours is not None and (ours.shape != theirs.shape or not fits):
            moved = answers[BestCut(case)] if ":" in paper_plan(case).shape else None
            why = sentence(case, paper_plan(case), ours, theirs, moved)
            limit = "" if fits else "; the paper's plan needs more than 16 GB here, and has them"
            yield f"{case.model} on {case.cluster[-1].upper()}: {why}{limit}."


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
        return [*row, "nothing fits", "", "", "", "", ""]
    row += [label(ours, profile), f"{ours.micro_batches}", f"{ours.seconds * 1e3:.1f}"]
    row += [f"{ours.seconds / answers[Bound(case)] - 1:.1%}"]
    slower = ratio is not None and ratio < 1 - SAME and fits
    row += [f"**{ratio:.4f}**" if slower else f"{ratio:.3f}"]
    return [*row, REFERENCE_GAINS.get((case.model, case.cluster), "")]
