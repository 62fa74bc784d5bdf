"""Why this plan: what binds it, and what its nearest alternatives would cost.

What binds is found by asking the simulator again: with each stage's layers a tenth faster, with
transfers for free, with AllReduces for free. Alternatives are data parallelism, a straight pipeline,
and the best plans with one stage fewer (two neighbours joined) and one more (a stage split), each
under the same memory and the same number of micro-batches; the last two only for plans under the
schedules that the search itself knows, where the search has judged them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from dapple.costs import CostModel
from dapple.planner.alternatives import one_stage_fewer, one_stage_more
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal
from dapple.planner.search import SearchResult
from dapple.records import Alternative, Explanation, ModelProfile, Plan
from dapple.schedule import warmup_counts
from dapple.simulator import step_seconds
from dapple.units import format_bytes

FASTER = 0.9
_NOTICEABLE = 0.005


def explain(result: SearchResult, profile: ModelProfile, problem: Problem) -> Explanation:
    """Explain the plan of a search.

    Args:
        result: the search's result.
        profile: the model's costs.
        problem: the same profile, cluster, batch and options; for a plan under a schedule that the
            search does not know, of the early-backward schedule.
    """
    plan = result.plan
    if plan.schedule != problem.schedule or plan.virtual > 1:
        return _under_another_schedule(result, profile, problem)
    if any(stage.rows for stage in plan.stages):
        problem = problem.with_proportional_rows()
    here = _seconds(plan, profile)
    fewer = one_stage_fewer(problem, plan.stages, plan.num_micro_batches)
    more = one_stage_more(problem, plan.stages, plan.num_micro_batches)
    return Explanation(
        step_seconds=here,
        binding=(*_binding(plan, profile, here), *_memory(plan, problem)),
        alternatives=(
            *_named(result, ("dp", "straight")),
            _best(problem, "one stage fewer", fewer, plan),
            _best(problem, "one stage more", more, plan),
        ),
    )


def _under_another_schedule(
    result: SearchResult, profile: ModelProfile, problem: Problem
) -> Explanation:
    plan = result.plan
    here = _seconds(plan, profile)
    alternatives = tuple(
        other.model_copy(update={"name": f"{other.name} under {problem.schedule}"})
        for other in _named(result, ("dp", "straight"))
    )
    binding = _binding(plan, profile, here)
    return Explanation(step_seconds=here, binding=binding, alternatives=alternatives)


def _binding(plan: Plan, profile: ModelProfile, here: float) -> tuple[str, ...]:
    gains: list[tuple[float, str]] = []
    for number, stage in enumerate(plan.stages):
        faster = _with_faster_layers(profile, range(stage.start, stage.stop))
        gain = _share(here - _seconds(plan, faster), here)
        layers = (
            f"layers {stage.start}-{stage.stop - 1}, {_names(profile, stage.start, stage.stop)}"
        )
        gains.append(
            (gain, f"compute of stage {number} ({layers}): a tenth faster gives {100 * gain:.1f} %")
        )
    for cut, (stage, _) in enumerate(itertools.pairwise(plan.stages)):
        layer = profile.layers[stage.stop - 1].name
        gain = _share(here - _seconds(plan, _without_cut(profile, stage.stop)), here)
        where = f"transfers between stages {cut} and {cut + 1} (cut after {layer})"
        gains.append((gain, f"{where}: for free gives {100 * gain:.1f} %"))
    gain = _share(here - _seconds(plan, _without_gradients(profile)), here)
    gains.append((gain, f"AllReduce of gradients: for free gives {100 * gain:.1f} %"))
    found = [text for gain, text in sorted(gains, reverse=True) if gain > _NOTICEABLE]
    return tuple(found) or ("nothing in particular",)


def _share(part: float, whole: float) -> float:
    """A part of a step; of one that takes no time nothing is part."""
    return part / whole if whole > 0 else 0.0


def _memory(plan: Plan, problem: Problem) -> Iterator[str]:
    wanted = warmup_counts(plan.num_stages, plan.num_micro_batches, "A")
    most = problem.most_in_flight(plan.stages, plan.num_micro_batches)
    for number, (stage, want, held) in enumerate(zip(plan.stages, wanted, most, strict=True)):
        if stage.warmup < want and held < want and problem.memory_is_known:
            memory = min(problem.cluster.kind_of_device()[d].memory for d in stage.devices)
            yield (
                f"memory of stage {number}: {format_bytes(memory)} hold {held} micro-batches in "
                f"flight, policy A would take {want}"
            )


def _named(result: SearchResult, names: Iterable[str]) -> Iterator[Alternative]:
    for name in names:
        refusal = next((r for r in result.refusals if r.name == name), None)
        if name in result.candidates:
            found = result.candidates[name]
            text = f"{found.layout.micro_batches} micro-batches"
            yield Alternative(name=name, step_seconds=found.step_seconds, reason=text)
        elif refusal is not None:
            yield Alternative(name=name, reason=str(refusal))


def _best(problem: Problem, name: str, layouts: Iterable[Layout], plan: Plan) -> Alternative:
    best: tuple[float, Layout] | None = None
    refused: Refusal | None = None
    for layout in layouts:
        stages = problem.fit(layout, name)
        if isinstance(stages, Refusal):
            refused = refused or stages
            continue
        seconds = problem.step_seconds(stages, layout.micro_batches)
        if best is None or seconds < best[0]:
            best = seconds, layout
    if best is not None:
        return Alternative(name=name, step_seconds=best[0], reason=_words(best[1]))
    if refused is not None:
        return Alternative(name=name, reason=str(refused))
    one = "it has one stage" if plan.num_stages == 1 else "every stage is one layer or one device"
    return Alternative(name=name, reason=f"there is none: {one}")


def _words(layout: Layout) -> str:
    replicas = ":".join(str(len(devices)) for devices in layout.devices)
    return f"replicas {replicas}, cuts before {list(layout.bounds[1:-1])}"


def _names(profile: ModelProfile, start: int, stop: int) -> str:
    first, last = profile.layers[start].name, profile.layers[stop - 1].name
    return first if stop - start == 1 else f"{first} to {last}"


def _seconds(plan: Plan, profile: ModelProfile) -> float:
    model = CostModel(profile, plan.cluster, plan.network_model)
    return step_seconds(
        model, plan.stages, plan.global_batch_size, plan.num_micro_batches, plan.schedule
    )


def _with_faster_layers(profile: ModelProfile, layers: range) -> ModelProfile:
    changed = [
        layer.model_copy(
            update={
                "forward_seconds": tuple(FASTER * t for t in layer.forward_seconds),
                "backward_seconds": tuple(FASTER * t for t in layer.backward_seconds),
            }
        )
        if number in layers
        else layer
        for number, layer in enumerate(profile.layers)
    ]
    return profile.model_copy(update={"layers": tuple(changed)})


def _without_cut(profile: ModelProfile, cut: int) -> ModelProfile:
    nothing = {"bytes_per_sample": 0.0, "fixed_bytes": 0.0}
    tensors = [
        t.model_copy(update=nothing)
        if t.producer < cut and any(layer >= cut for layer in t.consumers)
        else t
        for t in profile.tensors
    ]
    return profile.model_copy(update={"tensors": tuple(tensors)})


def _without_gradients(profile: ModelProfile) -> ModelProfile:
    layers = [layer.model_copy(update={"parameter_bytes": 0}) for layer in profile.layers]
    return profile.model_copy(update={"layers": tuple(layers), "tied": ()})
