"""What the parts of the page need computed: values, so that equal ones are computed once.

A part names its questions; the runner answers each different one in one of two processes.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

from benchmarks.paper.facts import DEVICE
from benchmarks.planner.referee import Judged, judged
from dapple.cluster import Cluster, preset
from dapple.costs import CostModel
from dapple.errors import MemoryPlanError
from dapple.planner import SearchOptions, search
from dapple.planner.problem import Problem
from dapple.records import ModelProfile, StagePlan
from dapple.records.shipped import shipped_profile
from dapple.simulator import step_seconds

T = TypeVar("T")
_UNLIMITED = "1 TiB"


class Question(ABC, Generic[T]):
    """Something to compute, from its fields alone; subclasses are frozen dataclasses."""

    @abstractmethod
    def answer(self) -> T:
        """Compute it."""


class Answers:
    """The answer of every question that was asked."""

    def __init__(self, found: dict[Question[Any], Any]) -> None:
        self._found = found

    def __getitem__(self, question: Question[T]) -> T:
        """The answer to one of the questions."""
        answer: T = self._found[question]
        return answer


def answer_all(questions: Iterable[Question[Any]], processes: int = 2) -> Answers:
    """Answer each different question once; the order of answers does not depend on timing."""
    different = list(dict.fromkeys(questions))
    if processes == 1:
        return Answers({question: question.answer() for question in different})
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = {}
        for question, (answer, seconds) in zip(different, pool.map(_timed, different), strict=True):
            found[question] = answer
            print(f"{len(found):4}/{len(different)} {seconds:6.1f} s CPU  {question}", flush=True)
    return Answers(found)


def _timed(question: Question[T]) -> tuple[T, float]:
    begun = time.process_time()
    return question.answer(), time.process_time() - begun


@functools.cache
def profile_of(model: str) -> ModelProfile:
    """The profile of one of the paper's models that comes with dapple."""
    found = shipped_profile(model, DEVICE)
    assert found is not None, model
    return found


@dataclass(frozen=True)
class Case:
    """A model on a cluster: what is planned and simulated."""

    model: str
    cluster: str
    batch: int
    network: str = "shared"

    @property
    def profile(self) -> ModelProfile:
        """The model's profile."""
        return profile_of(self.model)

    @property
    def devices(self) -> Cluster:
        """The cluster."""
        return preset(self.cluster)

    def problem(self, *, memory: bool = True, rows: int | None = None) -> Problem:
        """The planning problem; without `memory` every device holds everything.

        Args:
            memory: whether devices have the memory that they have.
            rows: of a micro-batch; None: to be chosen.
        """
        cluster = self.devices if memory else self.devices.with_memory(_UNLIMITED)
        return Problem(
            self.profile, cluster, self.batch, network_model=self.network, micro_batch_size=rows
        )


@dataclass(frozen=True)
class Ours(Question[Judged | None]):
    """The plan of our search alone; None: nothing fits."""

    case: Case

    def answer(self) -> Judged | None:
        """Search without baselines."""
        case, options = self.case, SearchOptions(baselines=False)
        try:
            return judged(
                search(
                    case.profile,
                    case.devices,
                    case.batch,
                    network_model=case.network,
                    options=options,
                ).plan
            )
        except MemoryPlanError:
            return None


@dataclass(frozen=True)
class OneDevice(Question[float]):
    """Seconds that one device would need for a step, if its memory held everything."""

    model: str
    batch: int

    def answer(self) -> float:
        """The shortest step over M: the strongest reference, not the paper's."""
        case = Case(self.model, "config-a:1x1", self.batch)
        model = CostModel(case.profile, case.devices, "shared")
        stage = StagePlan(start=0, stop=case.profile.num_layers, devices=(0,))
        counts = case.problem(memory=False).micro_batch_counts
        return min(step_seconds(model, (stage,), self.batch, count) for count in counts)
