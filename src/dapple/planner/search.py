"""The planner: from a profile, a cluster and a batch to the plan with the shortest step."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dapple.cluster import Cluster
from dapple.errors import InputError, MemoryPlanError
from dapple.planner.baselines import BASELINES, FIXED_SCHEDULES, candidates
from dapple.planner.certificate import Prospects, lower_bound
from dapple.planner.collecting import seldom_collecting
from dapple.planner.contest import TOLD, Candidate, Contest, better
from dapple.planner.general import GeneralSearch
from dapple.planner.notes import expected, notes_on, nothing_fits
from dapple.planner.paper import FORMULAS
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.reschedule import rescheduled, scheduled
from dapple.planner.under import best_under, straight_contests
from dapple.records import ModelProfile, Plan
from dapple.schedule import SCHEDULES, is_file
from dapple.simulator import predict

ANY = "any"
"""Instead of a schedule: whichever is best."""
_EVERY = (("early-backward", 1), ("gpipe", 1), ("zero-bubble", 1))
"""Schedules of one stage per device."""
_FEW_DEVICES = 32
"""Up to so many the search asks the lower bound which M to look at; on more looking is faster."""
PLANNERS = ("dapple", *BASELINES)
"""Names for `make_plan(planner=...)`."""


@dataclass(frozen=True)
class SearchOptions:
    """What a search looks at.

    Attributes:
        baselines: the baselines are candidates, so that the answer is never worse.
        exact: look at all layouts where there are few enough.
        certificate: compute a lower bound on the step of all plans, and look at no M that it rules out.
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
        schedule: one of `dapple.schedule.SCHEDULES`, or "any": the best of them all. Plans for
            "interleaved", "zero-bubble" and "any" are found under early backward, put under their
            own schedule, and improved there, as are those for the schedule of a CSV file, which
            must have the rows and micro-batches of one of them.
        network_model: "shared" or "paper"; None: the cluster's.
        warmup: policy "A" or "B", or "tuned": the smallest K_i with the best step; None: best.
        recompute: stages may run their forwards again where memory is short.
        shard: replicas may share out their optimizer's state, where memory is short or the update
            shorter for it.
        virtual: stages per device, for "interleaved" (None: 2; of "any" likewise) and "gpipe"
            (None: 1).

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


@seldom_collecting()
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
    if schedule not in (*SCHEDULES, ANY) and not is_file(schedule):
        raise InputError(
            f'schedule "{schedule}" is unknown; known: {", ".join(SCHEDULES)}, {ANY}, or a .csv file'
        )
    if virtual is None:
        virtual = 2 if schedule in ("interleaved", ANY) else 1
    if virtual < 1:
        raise InputError(f"{virtual} stages per device are impossible; use at least 1")
    plain = schedule in SCHEDULES[:2] and virtual == 1
    problem = Problem(
        profile,
        cluster,
        global_batch_size,
        micro_batch_size=micro_batch_size,
        optimizer=optimizer,
        schedule=FIXED_SCHEDULES.get(planner, schedule if plain else SCHEDULES[0]),
        network_model=network_model,
        warmup=warmup,
        recompute=recompute,
        shard=shard,
    )
    # Other schedules are looked for among all that early backward was; rows may be unequal as well.
    asks = options.certificate and plain and not problem.speeds_differ
    asks = asks and problem.num_devices <= _FEW_DEVICES
    prospects = Prospects(problem) if planner == "dapple" and asks else None
    runs = [Contest(problem)]
    if planner != "dapple":
        runs[0].try_baselines([planner])
    else:
        _search(runs[0], options, prospects)
    runs[0].tune()
    if planner == "dapple" and options.proportional and problem.speeds_differ:
        runs.append(_proportional(runs[0], options))
    best = functools.reduce(better, (run.best for run in runs))
    if planner == "dapple":
        best = _settled(runs, best)
    if best is None:
        raise MemoryPlanError(nothing_fits(runs[0].refusals.values()))
    plan = problem.plan(best.layout, best.stages, planner)
    refusals = tuple(r for name, r in runs[0].refusals.items() if name not in runs[0].candidates)
    if not plain:
        wanted = [(schedule, virtual)] if schedule != ANY else [*_EVERY, ("interleaved", virtual)]
        made = _under(plan, profile, runs, wanted)
        return SearchResult(made, runs[0].candidates, refusals)
    predicted = predict(plan, profile)
    notes = notes_on(problem)
    if planner in FORMULAS:
        notes += (expected(problem, best.layout, planner, predicted.step_seconds),)
    if planner == "dapple" and options.certificate:
        seconds, count = predicted.step_seconds, plan.num_micro_batches
        bound = lower_bound(problem, seconds, count, prospects)
        predicted = predicted.model_copy(update={"lower_bound_seconds": bound})
    plan = plan.model_copy(update={"predicted": predicted, "notes": notes})
    return SearchResult(plan, runs[0].candidates, refusals)


def _search(run: Contest, options: SearchOptions, prospects: Prospects | None) -> None:
    """Baselines, then every layout if they are few, else the general search."""
    names = candidates(run.problem) if options.baselines else ()
    run.try_baselines([name for name in names if name in TOLD], postpone=True)
    if not (options.exact and run.try_all()):
        GeneralSearch(run.problem, run, prospects).run()
    best = run.best

    def may_win(count: int) -> bool:
        if prospects is None or best is None:
            return True
        return prospects.allow(count, best.step_seconds * (1 - 1e-9))

    rest = [name for name in names if name not in TOLD]
    run.try_baselines(rest, postpone=True, may_win=may_win)
    run.try_postponed()


def _settled(runs: Sequence[Contest], best: Candidate | None) -> Candidate | None:
    """The best candidate of all runs, or what is faster around it by the rules of its own run."""
    in_proportion = best is not None and any(stage.rows for stage in best.stages)
    run = next(run for run in runs if run.problem.proportional == in_proportion)
    run.best = best
    run.settle()
    return run.best


def _proportional(even: Contest, options: SearchOptions) -> Contest:
    """The same with replicas of different speed that have rows in proportion to it."""
    limit = even.best.step_seconds if even.best else math.inf
    run = Contest(even.problem.with_proportional_rows(), limit=limit)
    if options.baselines:
        run.try_baselines(["dp"])
    starts = [candidate.layout for candidate in even.candidates.values()]
    for layout in starts:
        run.judge(layout, "dapple")
    if not (options.exact and run.try_all()):
        GeneralSearch(run.problem, run).run(starts)
    run.tune()
    return run


def _under(
    plan: Plan, profile: ModelProfile, runs: list[Contest], wanted: Sequence[tuple[str, int]]
) -> Plan:
    """The fastest plan under one of some schedules, which are not searched for themselves.

    Args:
        plan: the fastest under early backward.
        profile: the model's costs.
        runs: the searches that it is from, and that others are taken from.
        wanted: schedules, and stages per device under each; of equally fast plans the first wins.

    Raises:
        PlanError: the plan can not be put under the schedule, nor can any other: says why.
    """
    problem = runs[0].problem
    if plan.planner == "dapple":
        runs = [*runs, *straight_contests(problem)]
    made: list[Plan] = []
    for schedule, virtual in wanted:
        around = plan.planner == "dapple" and (schedule, virtual) != _EVERY[0]
        # One set of devices has nothing to interleave with; asked for by name it is made all the same.
        least = 2 if virtual > 1 and len(wanted) > 1 else 1
        trial = best_under(runs, schedule, virtual, around=around, least_positions=least)
        if trial is not None:
            start = trial.start
            found = start.problem.plan(start.layout, start.stages, plan.planner)
            made.append(scheduled(found, profile, trial.stages, schedule, virtual))
    if not made:
        (schedule, virtual), *_ = wanted
        made.append(rescheduled(plan, profile, schedule, virtual))

    def rank(found: Plan) -> tuple[float, int]:
        assert found.predicted is not None, "a plan put under a schedule is predicted"
        return found.predicted.step_seconds, found.num_stages

    best = min(made, key=rank)
    names = ", ".join(schedule for schedule, _ in wanted)
    note = f"searched under early-backward; put under {names}, the best of these plans and of others near"
    return best.model_copy(update={"notes": (*notes_on(problem), note)})
