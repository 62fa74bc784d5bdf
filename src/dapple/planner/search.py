"""The planner: from a profile, a cluster and a batch to the plan with the shortest step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapple.cluster import Cluster
from dapple.errors import InputError, MemoryPlanError, PlanError
from dapple.planner.baselines import BASELINES, FIXED_SCHEDULES, candidates
from dapple.planner.certificate import lower_bound
from dapple.planner.contest import Candidate, Contest, better
from dapple.planner.general import GeneralSearch
from dapple.planner.notes import expected, notes_on, nothing_fits
from dapple.planner.paper import FORMULAS
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.reschedule import RESCHEDULED, rescheduled
from dapple.records import ModelProfile, Plan
from dapple.schedule import SCHEDULES, is_file
from dapple.simulator import predict

PLANNERS = ("dapple", *BASELINES)
"""Names for `make_plan(planner=...)`."""


@dataclass(frozen=True)
class SearchOptions:
    """What a search looks at.

    Attributes:
        baselines: the baselines are candidates, so that the answer is never worse.
        exact: look at all layouts where there are few enough.
        certificate: compute a lower bound on the step of all plans.
        proportional: look at rows in proportion to speed, where devices differ.
    """

    baselines: bool = True
    exact: bool = True
    certificate: bool = True
    proportional: bool = True


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
    warmup: str | None = None,
    recompute: bool = False,
    shard: bool = False,
    virtual: int | None = None,
) -> Plan:
    """The plan with the shortest simulated step among those that fit.

    Args:
        profile: the model's costs.
        cluster: the devices; the plan may use fewer.
        global_batch_size: rows of a step, >= 1.
        micro_batch_size: rows of a micro-batch before the replica split; None: chosen.
        planner: "dapple" searches; the other `PLANNERS` are there to compare with.
        optimizer: "adamw", "sgd", ...; its state counts against the memory.
        schedule: one of `dapple.schedule.SCHEDULES`; plans for "interleaved" and "zero-bubble" are
            found under early backward and ranked under their own schedule, as are those for the
            schedule of a CSV file, which must have the rows and micro-batches of one of them.
        network_model: "shared" or "paper"; None: the cluster's.
        warmup: policy "A" or "B", or "tuned": the smallest K_i with the best step; None: best.
        recompute: stages may run their forwards again where memory is short.
        shard: replicas may share out their optimizer's state, where memory is short or the update
            shorter for it.
        virtual: stages per device, for "interleaved" (None: 2) and "gpipe" (None: 1).

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
        warmup=warmup,
        recompute=recompute,
        shard=shard,
        virtual=virtual,
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
    warmup: str | None = None,
    recompute: bool = False,
    shard: bool = False,
    virtual: int | None = None,
    options: SearchOptions | None = None,
) -> SearchResult:
    """Like `make_plan`, with the candidates that lost and the reasons why others were refused.

    Args:
        options: what the search leaves out; for experiments.

    Args, Raises: as `make_plan`.
    """
    options = options or SearchOptions()
    if planner not in PLANNERS:
        raise InputError(f'planner "{planner}" is unknown; known: {", ".join(PLANNERS)}')
    if schedule not in SCHEDULES and not is_file(schedule):
        raise InputError(
            f'schedule "{schedule}" is unknown; known: {", ".join(SCHEDULES)}, or a .csv file'
        )
    if virtual is None:
        virtual = 2 if schedule == "interleaved" else 1
    if virtual < 1:
        raise InputError(f"{virtual} stages per device are impossible; use at least 1")
    if schedule in RESCHEDULED or virtual > 1 or is_file(schedule):
        found = _base_plans(
            profile,
            cluster,
            global_batch_size,
            planner,
            options,
            micro_batch_size=micro_batch_size,
            optimizer=optimizer,
            network_model=network_model,
            warmup=warmup,
            recompute=recompute,
            shard=shard,
        )
        return _best_under(found, profile, schedule, virtual)
    problem = Problem(
        profile,
        cluster,
        global_batch_size,
        micro_batch_size=micro_batch_size,
        optimizer=optimizer,
        schedule=FIXED_SCHEDULES.get(planner, schedule),
        network_model=network_model,
        warmup=warmup,
        recompute=recompute,
        shard=shard,
    )
    run = Contest(problem)
    if planner != "dapple":
        run.try_baselines([planner])
    else:
        _search(run, options)
    run.tune()
    best = run.best
    if planner == "dapple" and options.proportional and problem.speeds_differ:
        best = better(best, _proportional(problem, run, options))
    if best is None:
        raise MemoryPlanError(nothing_fits(run.refusals.values()))
    plan = problem.plan(best.layout, best.stages, planner)
    predicted = predict(plan, profile)
    notes = notes_on(problem)
    if planner in FORMULAS:
        notes += (expected(problem, best.layout, planner, predicted.step_seconds),)
    if planner == "dapple" and options.certificate:
        bound = lower_bound(problem, predicted.step_seconds, plan.num_micro_batches)
        predicted = predicted.model_copy(update={"lower_bound_seconds": bound})
    plan = plan.model_copy(update={"predicted": predicted, "notes": notes})
    refusals = tuple(run.refusals[n] for n in run.refusals if n not in run.candidates)
    return SearchResult(plan, run.candidates, refusals)


def _search(run: Contest, options: SearchOptions) -> None:
    """Baselines, then every layout if they are few, else the general search."""
    if options.baselines:
        run.try_baselines(candidates(run.problem), postpone=True)
    if not (options.exact and run.try_all()):
        GeneralSearch(run.problem, run).run(run.starts)
    run.try_postponed()


def _proportional(problem: Problem, even: Contest, options: SearchOptions) -> Candidate | None:
    """The best candidate whose replicas of different speed have rows in proportion to it."""
    limit = even.best.step_seconds if even.best else math.inf
    run = Contest(problem.with_proportional_rows(), limit=limit)
    if options.baselines:
        run.try_baselines(["dp"])
    starts = [candidate.layout for candidate in even.candidates.values()]
    for layout in starts:
        run.judge(layout, "dapple")
    if not (options.exact and run.try_all()):
        GeneralSearch(run.problem, run).run(starts)
    run.tune()
    return run.best


def _base_plans(
    profile: ModelProfile,
    cluster: Cluster,
    global_batch_size: int,
    planner: str,
    options: SearchOptions,
    **arguments: Any,
) -> list[SearchResult]:
    """Plans for early backward to put under another schedule: the planner's, and straight ones."""
    found = []
    for name in dict.fromkeys([planner, *(("straight", "even") if planner == "dapple" else ())]):
        try:
            result = search(
                profile, cluster, global_batch_size, planner=name, options=options, **arguments
            )
        except MemoryPlanError:
            if name == planner:
                raise
            continue
        found.append(result)
    return found


def _best_under(
    found: Sequence[SearchResult], profile: ModelProfile, schedule: str, virtual: int
) -> SearchResult:
    """The base plan that is fastest under a schedule.

    Raises:
        PlanError: none can be put under it; says why the first one can not.
    """
    made: list[Plan] = []
    errors: list[PlanError] = []
    for result in found:
        try:
            made.append(rescheduled(result.plan, profile, schedule, virtual))
        except PlanError as error:
            errors.append(error)
    if not made:
        raise errors[0]

    def rank(plan: Plan) -> tuple[float, int]:
        assert plan.predicted is not None
        return plan.predicted.step_seconds, plan.num_stages

    best = min(made, key=rank)
    note = f"searched under early-backward; the fastest of {len(made)} under {schedule}"
    plan = best.model_copy(update={"planner": found[0].plan.planner, "notes": (*best.notes, note)})
    return SearchResult(plan, found[0].candidates, found[0].refusals)
