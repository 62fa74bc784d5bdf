"""Our planner against PipeDream's on 2x8 and 4x8, as speedups over one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.paper.facts import PLANNER_BATCHES, PLANNER_SPEEDUPS, PROFILE_ROWS
from benchmarks.paper.markdown import bullets, join, paragraph, table
from benchmarks.paper.questions import Answers, Case, OneDevice, Ours, Question, profile_of
from benchmarks.planner.referee import Judged, baseline, best_of, label
from dapple.cluster import NETWORK_MODELS
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem

_SIZES = {"config-a": "2x8", "config-a:4x8": "4x8"}


@dataclass(frozen=True)
class PipeDream(Question[tuple[Judged, bool]]):
    """PipeDream's plan at its best M, and whether it fits 16 GB.

    Attributes:
        rows: of the minibatch that is planned for; None: as many as is best.
    """

    case: Case
    rows: int | None = None

    def answer(self) -> tuple[Judged, bool]:
        """Its planner for every minibatch size, activations' transfers priced; the best is kept."""
        for memory in (True, False):
            problem = self.case.problem(memory=memory)
            found = best_of(problem, self._layouts(problem))
            if found is not None:
                return found, memory
        raise AssertionError("every plan fits unlimited memory")

    def _layouts(self, problem: Problem) -> Iterator[Layout]:
        if self.rows is None:
            yield from baseline(problem, "pipedream")
            return
        (layout,) = baseline(self.case.problem(rows=self.rows), "pipedream")
        for count in problem.micro_batch_counts:
            yield replace(layout, micro_batches=count)


def cases(network: str) -> list[Case]:
    """Four models on two clusters."""
    return [
        Case(model, cluster, PLANNER_BATCHES[model], network)
        for cluster, model in itertools.product(_SIZES, PLANNER_BATCHES)
    ]


def questions() -> Iterator[Question[object]]:
    """Ours, PipeDream's and one device."""
    for case in itertools.chain.from_iterable(map(cases, NETWORK_MODELS)):
        yield Ours(case)
        yield PipeDream(case)
        yield PipeDream(case, PROFILE_ROWS[case.model])
        yield OneDevice(case.model, case.batch)


def section(answers: Answers) -> str:
    """A table per network and what sets the figures apart."""
    parts = [
        "## Our planner against PipeDream's",
        paragraph(
            """*Simulated.* Speedup over one device whose memory holds everything, at its best
            micro-batch. PipeDream's planner (its dynamic programme with the activations' transfers in
            it) plans for every size of minibatch; each of its plans is run in synchronous steps by our
            referee, and the fastest counts. **ratio** is our speedup over PipeDream's. Ours ran
            without PipeDream's plan among its candidates. BERT-Large's batch is a guess, 128."""
        ),
    ]
    for network in NETWORK_MODELS:
        header = ("model, batch", "cluster", "the paper: DAPPLE:", "PipeDream:", "ratio:")
        header += ("ours", "speedup:", "PipeDream", "speedup:", "ratio:")
        header += ("PipeDream, planned for the profile's rows", "speedup:", "ratio:")
        rows = [_row(answers, case) for case in cases(network)]
        parts += [f"### PipeDream's: network model `{network}`", table(header, rows)]
    return join(*parts, bullets(_differences(answers)))


def _row(answers: Answers, case: Case) -> list[str]:
    ours, (other, fits) = answers[Ours(case)], answers[PipeDream(case)]
    one, profile = answers[OneDevice(case.model, case.batch)], profile_of(case.model)
    theirs = PLANNER_SPEEDUPS[case.model, case.cluster]
    row = [f"{case.model}, {case.batch}", _SIZES[case.cluster]]
    row += [f"{theirs[0]:.1f}", f"{theirs[1]:.1f}", f"{theirs[0] / theirs[1]:.2f}"]
    assert ours is not None, case
    row += [f"{label(ours, profile)}, M {ours.micro_batches}", f"{one / ours.seconds:.1f}"]
    row += [
        f"{label(other, profile)}, M {other.micro_batches}" + ("" if fits else " (does not fit)")
    ]
    row += [f"{one / other.seconds:.1f}", f"{other.seconds / ours.seconds:.2f}"]
    small, _ = answers[PipeDream(case, PROFILE_ROWS[case.model])]
    row += [f"{label(small, profile)}, M {small.micro_batches}"]
    return [*row, f"{one / small.seconds:.1f}", f"{small.seconds / ours.seconds:.2f}"]


def _differences(answers: Answers) -> Iterator[str]:
    found = [_ratios(answers, case) for network in NETWORK_MODELS for case in cases(network)]
    best = [ratio for ratio, _, _ in found]
    less = sum(ratio < paper for ratio, _, paper in found)
    yield (
        f"Ours is ahead by {min(best):.2f}x to {max(best):.2f}x, in {less} of {len(found)} cells by less "
        "than in the paper, because this is PipeDream at its best: the size of its minibatch is chosen "
        "for it, its micro-batches in flight as well, and its plan runs in synchronous steps, with the "
        "AllReduce once a step where PipeDream itself has it after every minibatch."
    )
    off = [(abs(math.log(few / paper)), abs(math.log(one / paper))) for one, few, paper in found]
    nearer, further = sum(a < b for a, b in off), sum(a > b for a, b in off)
    yield (
        "The last columns are PipeDream's planner given a minibatch of as many rows as the paper's "
        "profiles have (1, 2, 1 and 32), after each of which it expects an AllReduce, and then the M that "
        "suits its plan. That is how it is meant to be used. The ratio is nearer to the paper's in "
        f"{nearer} of {len(off)} cells, further from it in {further}."
    )


def _ratios(answers: Answers, case: Case) -> tuple[float, float, float]:
    """Our speedup over PipeDream's at its best and planned for the profile's rows; the paper's.

    The first two as the tables print them, so that the count agrees with what is read there.
    """
    ours, paper = answers[Ours(case)], PLANNER_SPEEDUPS[case.model, case.cluster]
    assert ours is not None, case
    plans = PipeDream(case), PipeDream(case, PROFILE_ROWS[case.model])
    best, few = (round(answers[plan][0].seconds / ours.seconds, 2) for plan in plans)
    return best, few, paper[0] / paper[1]
