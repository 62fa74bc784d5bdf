"""docs/paper.md's parts, each on little of what the page has."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.paper import hybrid, planners, plans, scaling
from benchmarks.paper.acr import acr
from benchmarks.paper.differences import waits
from benchmarks.paper.errata import Errata
from benchmarks.paper.facts import ACRS, BATCHES, CLUSTERS, MODELS, PLANS, POLICY_GAINS
from benchmarks.paper.gpipe_simulated import Cell
from benchmarks.paper.markdown import table
from benchmarks.paper.page import PARTS
from benchmarks.paper.policies import PolicyGain
from benchmarks.paper.questions import (
    Answers,
    Case,
    OneDevice,
    Ours,
    Question,
    answer_all,
    profile_of,
)
from benchmarks.planner.referee import Judged, baseline, best_of

from dapple.records import StagePlan

ASKED: list[int] = []


@dataclass(frozen=True)
class Square(Question[int]):
    number: int

    def answer(self) -> int:
        ASKED.append(self.number)
        return self.number**2


class Made(dict[Question[Any], Any]):
    """Answers without computing: data parallelism in a second, others as given."""

    def __missing__(self, question: Question[Any]) -> Any:
        if isinstance(question, OneDevice):
            return 8.0
        if isinstance(question, hybrid.NoOverlap):
            return 2.0
        pairs = (plans.Theirs, planners.PipeDream)
        assert isinstance(question, (Ours, hybrid.DataParallel, *pairs)), question
        layers = profile_of(question.case.model).num_layers
        judged = Judged((StagePlan(start=0, stop=layers, devices=(0, 1)),), 1, 1.0)
        return (judged, True) if isinstance(question, pairs) else judged


def test_equal_questions_are_answered_once() -> None:
    """Parts that ask the same share the answer."""
    ASKED.clear()
    answers = answer_all([Square(3), Square(2), Square(3)], processes=1)
    assert ASKED == [3, 2]
    assert answers[Square(3)] == 9


def test_every_part_asks_what_can_be_compared_and_sent_to_a_process() -> None:
    """Questions are values: as many different ones as the page's tables have cells, no fewer."""
    asked = [question for part in PARTS for question in part.questions()]
    different = set(asked)
    assert len(different) < len(asked)
    assert sum(isinstance(q, plans.Theirs) for q in different) == 2 * len(MODELS) * len(CLUSTERS)
    assert sum(isinstance(q, hybrid.DataParallel) for q in different) >= 15 * len(hybrid.FACTORS)


def test_the_papers_cuts_are_layers_of_our_profiles() -> None:
    """So many repeated layers lie before each cut as the paper counts."""
    for model, plan in itertools.chain.from_iterable(
        ((model, plan) for plan in PLANS[model]) for model in MODELS
    ):
        names = [layer.name for layer in profile_of(model).layers]
        for behind in plan.behind:
            kept = names[: names.index(behind) + 1]
            counted = [n for n in kept if n.startswith(("blocks.", "cells.", "features."))]
            counted += [n for n in kept if n.startswith(("encoder.", "both_ways", "first"))]
            # AmoebaNet's reduction cells are no normal cells: two at its start, then every 13th.
            reductions = {"cells.0", "cells.1", "cells.14", "cells.27"}
            assert len([n for n in counted if n not in reductions]) == plan.cut, (model, behind)


def test_a_plan_of_the_paper_that_beats_ours_is_shown() -> None:
    """The page's first line says where ours is slower, and only there."""
    case = Case("bert-48", "config-a", BATCHES["bert-48"], "shared")
    assert "Ours is slower in none of the 36 cells" in plans.verdict(Answers(Made()))
    judged = Judged((StagePlan(start=0, stop=50, devices=(0, 1)),), 1, 0.9)
    lost = plans.verdict(Answers(Made({plans.Theirs(case): (judged, True)})))
    assert lost.startswith("**Ours is slower")
    assert lost.count("\n- ") == 1
    assert "bert-48 on config-a" in lost


def test_the_papers_plan_keeps_its_replicas_and_its_cut() -> None:
    """VGG-19 on C: 15:1 behind the thirteenth convolution, with the best M of our profile."""
    judged, fits = plans.Theirs(Case("vgg-19", "config-c", 32)).answer()
    assert fits
    assert judged.replicas == (15, 1)
    assert profile_of("vgg-19").layers[judged.stages[0].stop - 1].name == "features.12"


def test_our_plan_lies_above_the_bound() -> None:
    """ResNet-50 on four devices of B: within 5 % of what any plan must take, and not below."""
    case = Case("resnet-50", "config-b:4x1", 128)
    ours, bound = Ours(case).answer(), plans.Bound(case).answer()
    assert ours is not None
    assert bound <= ours.seconds <= bound * 1.05


def test_without_overlap_data_parallelism_takes_longer() -> None:
    """The AllReduce of VGG-19 on C, 0.6 GB, is not free."""
    case = Case("vgg-19", "config-c", 512)
    overlap, late = hybrid.DataParallel(case).answer(), hybrid.NoOverlap(case).answer()
    assert overlap is not None
    assert late is not None
    assert late > overlap.seconds * 1.05


def test_pipedreams_plan_takes_every_device() -> None:
    """Whatever its stages, PipeDream leaves no device idle."""
    judged, fits = planners.PipeDream(Case("vgg-19", "config-a", 256)).answer()
    assert fits
    assert sum(judged.replicas) == 16


def test_the_page_counts_where_pipedream_is_nearer_to_the_paper() -> None:
    """The paper's ratio for XLNet-36 on 2x8 is 1.73, the least is BERT-Large's 1.26."""
    case = Case("xlnet-36", "config-a", 128, "shared")
    slow = Judged((StagePlan(start=0, stop=38, devices=(0, 1)),), 1, 1.7), True
    for rows, nearer, further in ((1, 1, 0), (None, 0, 1)):
        answers = Answers(Made({planners.PipeDream(case, rows): slow}))
        text = " ".join(planners.section(answers).split())
        assert "in 16 of 16 cells by less than in the paper" in text
        assert (
            f"nearer to the paper's in {nearer} of 16 cells, further from it in {further}" in text
        )
    slow = Judged(slow[0].stages, 1, 1.8), True
    text = planners.section(Answers(Made({planners.PipeDream(case): slow})))
    assert "in 15 of 16 cells by less" in text


def test_a_step_waits_for_what_it_would_be_shorter_without() -> None:
    """Data parallelism waits for its AllReduce and for no transfer, a straight pipeline inversely."""
    case = Case("bert-48", "config-c", 64)
    problem = case.problem(rows=4)
    parallel, straight = (best_of(problem, baseline(problem, n)) for n in ("dp", "straight"))
    assert parallel is not None
    assert straight is not None
    assert waits(case, parallel).allreduce > parallel.seconds / 2
    assert waits(case, parallel).transfers == 0
    assert waits(case, straight).allreduce == 0
    assert waits(case, straight).transfers > 0


def test_acr_follows_the_bandwidth_of_flows() -> None:
    """The same plan on C has 2.5 times its ratio on B, as flows are that much slower."""
    fast, slow = (acr(Case("bert-48", cluster, 64, "paper")) for cluster in CLUSTERS[1:])
    assert slow == pytest.approx(2.5 * fast)
    assert 0.5 < fast / ACRS["bert-48", "config-b"] < 1


def test_early_backward_holds_the_same_whatever_m_is() -> None:
    """GPipe's peak grows with M, early backward's does not, and both take as long."""
    gpipe, early = ([Cell(run, count).answer() for count in (5, 8)] for run in ("gpipe", "dapple"))
    assert gpipe[1][1] > gpipe[0][1] * 1.2
    assert early[1][1] == early[0][1]
    assert early[1][0] == pytest.approx(gpipe[1][0], rel=0.02)


def test_policy_b_gains_no_more_than_half_the_acr() -> None:
    """Two stages under policy A turn two micro-batches a round trip."""
    acr, _ = POLICY_GAINS["xlnet-36"]
    gain = PolicyGain("xlnet-36", 64).answer()
    assert 1.01 < gain.quoted <= 1 + acr / 2 + 1e-9
    assert gain.tuned >= gain.quoted - 1e-9


def test_the_largest_bert_has_no_room_for_another_block() -> None:
    """One block more and the pipeline does not fit."""
    question = scaling.LargestBert(2)
    largest = question.answer()
    assert largest.blocks > 60
    assert largest.peak <= 16 * 2**30
    assert question.fitting(largest.blocks + 1) is None


def test_the_printed_pivot_errs_more_than_the_corrected_one() -> None:
    """Both below the simulated step at M = 4, the printed rule further."""
    printed, corrected, _ = Errata(4, pipelines=25).answer()
    assert printed.mean < corrected.mean < 0
    assert printed.lowest < corrected.lowest


def test_a_picture_shows_every_panel(tmp_path: Path) -> None:
    """All models in one file."""
    plots = pytest.importorskip("benchmarks.paper.plots")
    (path,) = plots.draw(Answers(Made()), tmp_path, pictures=["config-b"])
    picture = path.read_text()
    assert all(f">{model}<" in picture for model in hybrid.SHOWN)
    assert "<dc:date>" not in picture


def test_tables_align_numbers_right() -> None:
    """Headings that end with a colon."""
    assert table(("a", "b:"), [["x", "1"]]) == "| a | b |\n|---|--:|\n| x | 1 |"
