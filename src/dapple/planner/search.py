"""The planner: from a profile, a cluster and a batch to the plan with the shortest step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dapple.cluster import Cluster
from dapple.errors import InputError, MemoryPlanError
from dapple.planner.baselines import BASELINES
from dapple.planner.exact import families, in_order
from dapple.planner.problem import Layout, Problem
from dapple.planner.refusal import Refusal
from dapple.records import ModelProfile, Plan, StagePlan
from dapple.simulator import predict

PLANNERS = ("dapple", *BASELINES)
"""Names for `make_plan(planner=...)`."""

_LAYOUT_LIMIT = 60_000
_SIMULATION_LIMIT = 1_500
_SAME = 1e-9
"""Steps closer than this, relatively, are equal; then fewer stages win."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its simulated step in seconds."""

    name: str
    layout: Layout
    stages: tuple[StagePlan, ...]
    step_seconds: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        plan: the best plan, predicted.
        candidates: the best layout of each planner that found one, by the planner's name.
        refusals: why a planner found none: its layout that came closest.
    """

    plan: Plan
    candidates: dict[str, Candidate]
    refusals: tuple[Refusal, ...]


def make_plan(
    profile: ModelProfile,
    cluster: Cluster,
    global_batch_size: int,
    *,
    micro_batch_size: int | None = None,
    planner: str = "dapple",
    optimizer: str = "adamw",
    schedule: str = "early-backward",
    network_model: str | None = None,
) -> Plan:
    """The plan with the shortest simulated step among those that fit.

    Args:
        profile: the model's costs.
        cluster: the devices; the plan may use fewer.
        global_batch_size: rows of a step, >= 1.
        micro_batch_size: rows of a micro-batch before the replica split; None: chosen.
        planner: "dapple" searches; "dp", "straight" and "even" build what their names say.
        optimizer: "adamw", "sgd", ...; its state counts against the memory.
        schedule: "early-backward" or "gpipe".
        network_model: "shared" or "paper"; None: the cluster's.

    Returns:
        A plan with its prediction. Ties go to fewer stages; the same input gives the same plan.

    Raises:
        InputError: an unknown name, or a batch size out of range.
        MemoryPlanError: nothing fits; names the candidate that came closest.
    """
    return search(
        profile,
        cluster,
        global_batch_size,
        micro_batch_size=micro_batch_size,
        planner=planner,
        optimizer=optimizer,
        schedule=schedule,
        network_model=network_model,
    ).plan


def search(
    profile: ModelProfile,
    cluster: Cluster,
    global_batch_size: int,
    *,
    micro_batch_size: int | None = None,
    planner: str = "dapple",
    optimizer: str = "adamw",
    schedule: str = "early-backward",
    network_model: str | None = None,
) -> SearchResult:
    """Like `make_plan`, with the candidates that lost and the reasons why others were refused.

    Args, Raises: as `make_plan`.
    """
    if planner not in PLANNERS:
        raise InputError(f'planner "{planner}" is unknown; known: {", ".join(PLANNERS)}')
    problem = Problem(
        profile,
        cluster,
        global_batch_size,
        micro_batch_size=micro_batch_size,
        optimizer=optimizer,
        schedule=schedule,
        network_model=network_model,
    )
    run = _Search(problem)
    run.try_baselines(BASELINES if planner == "dapple" else [planner])
    whole = run.try_all() if planner == "dapple" else True
    if run.best is None:
        raise MemoryPlanError(_nothing_fits(run.refusals.values()))
    plan = problem.plan(run.best.layout, run.best.stages, planner)
    plan = plan.model_copy(update={"notes": _notes(problem, whole)})
    plan = plan.model_copy(update={"predicted": predict(plan, profile)})
    refusals = tuple(run.refusals[n] for n in run.refusals if n not in run.candidates)
    return SearchResult(plan, run.candidates, refusals)


@dataclass
class _Search:
    """The best candidates so far, by planner and over all."""

    problem: Problem
    best: Candidate | None = None
    candidates: dict[str, Candidate] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    _known: dict[Layout, Candidate | Refusal] = field(default_factory=dict)

    def try_baselines(self, names: Iterable[str]) -> None:
        """Every baseline at every number of micro-batches."""
        for name in names:
            for count in self.problem.micro_batch_counts:
                for layout in BASELINES[name](self.problem, count):
                    self.judge(layout, name)

    def try_all(self) -> bool:
        """Every layout whose bound allows it to win; False: there were too many."""
        found, whole = families(self.problem, _LAYOUT_LIMIT)
        left = _SIMULATION_LIMIT
        for least, layout in in_order(found):
            if self.best is not None and least > self.best.step_seconds * (1 + _SAME):
                break
            if left == 0:
                return False
            if isinstance(self.judge(layout, "dapple"), Candidate):
                left -= 1
        return whole

    def judge(self, layout: Layout, name: str) -> Candidate | Refusal:
        """Simulate a layout if it fits, and remember it or its refusal."""
        verdict = self._known.get(layout)
        if verdict is None:
            verdict = self._known[layout] = self._judge(layout, name)
        if isinstance(verdict, Refusal):
            if name not in self.refusals or verdict.excess < self.refusals[name].excess:
                self.refusals[name] = verdict
            return verdict
        if name not in self.candidates or _beats(verdict, self.candidates[name]):
            self.candidates[name] = verdict
        if self.best is None or _beats(verdict, self.best):
            self.best = verdict
        return verdict

    def _judge(self, layout: Layout, name: str) -> Candidate | Refusal:
        stages = self.problem.fit(layout, name)
        if isinstance(stages, Refusal):
            return stages
        seconds = self.problem.step_seconds(stages, layout.micro_batches)
        return Candidate(name, layout, stages, seconds)


def _beats(new: Candidate, old: Candidate) -> bool:
    """Shorter steps win; of equal ones fewer stages, then fewer devices and micro-batches."""
    if abs(new.step_seconds - old.step_seconds) > _SAME * old.step_seconds:
        return new.step_seconds < old.step_seconds
    return _rank(new.layout) < _rank(old.layout)


def _rank(layout: Layout) -> tuple[int, int, int, Layout]:
    devices = sum(map(len, layout.devices))
    return layout.num_stages, devices, layout.micro_batches, layout


def _notes(problem: Problem, whole: bool) -> tuple[str, ...]:
    notes = []
    if not problem.memory_is_known:
        notes.append("memory unchecked: the profile has no saved bytes for some layer")
    if len(problem.profile.batch_sizes) == 1:
        notes.append(
            f"times scaled in proportion to the rows from batch size "
            f"{problem.profile.batch_sizes[0]}, the only one in the profile"
        )
    if not whole:
        notes.append("the search was cut short: there are too many plans to look at all")
    return tuple(notes)


def _nothing_fits(refusals: Iterable[Refusal]) -> str:
    closest = min(refusals, key=lambda refusal: refusal.excess)
    return f"no plan fits the devices' memory; the closest: {closest}"
