"""What people see: the drawing, the tables and the trace."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from dapple.cluster import preset
from dapple.errors import InputError, PlanError
from dapple.records import Plan, Timeline
from dapple.reporting import (
    chrome_trace,
    compared_figures,
    pipeline_drawing,
    plan_table,
    predicted_against_measured,
)
from dapple.simulator import predict, simulate
from tests.simulator.pipelines import chain, cluster, plan, random_plans

PROFILE = chain([1, 1], [2, 2], parameter_bytes=4, optimizer_seconds=3.0)
PLAN = plan([2, 1], 6, 3, cluster(3, bandwidth=1.0))


def printed(what: RenderableType, width: int = 120) -> str:
    """As a terminal without colour shows it."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def predicted_plan() -> Plan:
    """The plan with its prediction."""
    return PLAN.model_copy(update={"predicted": predict(PLAN, PROFILE)})


def test_the_drawing_is_the_textbook_picture():
    """Two stages, three micro-batches, F = 1 s and B = 2 s; a column is a quarter of a second."""
    made = plan([1, 1], 3, 3, cluster(2, bandwidth=1e30))
    timeline = simulate(made, chain([1, 1], [2, 2]))
    assert str(pipeline_drawing(timeline, width=17 + 48)).splitlines() == [
        "rank  0 stage 0  0>>>1>>>........0<<<<<<<2>>>1<<<<<<<....2<<<<<<<",
        "rank  1 stage 1  ....0>>>0<<<<<<<1>>>1<<<<<<<2>>>2<<<<<<<........",
        "                 0                    6 s                    12 s",
        "> forward, < backward, . idle",
        "simulated step 12 s; bubble 25.0 %; one column 250 ms",
    ]


def test_replicas_allreduce_and_optimizer_are_drawn_too():
    """A row per replica; = until the gradients are summed, # for the update."""
    assert str(pipeline_drawing(simulate(PLAN, PROFILE), width=19 + 44)).splitlines()[:4] == [
        "rank  0 stage 0    0>>........0<<2>....1<<<......2<<======#####",
        "rank  1 stage 0.1  0>>........0<<2>....1<<<......2<<======#####",
        "rank  2 stage 1    ..0>>0<<<<<1>>1<<<<<2>>>2<<<<<#####.........",
        "                   0                 14 s                  28 s",
    ]


@settings(max_examples=60)
@given(random_plans(contended=True), st.integers(40, 200))
def test_every_row_of_a_drawing_is_as_wide_as_asked(case, width: int):
    """Whatever the plan, and however short its blocks."""
    made, profile = case
    timeline = simulate(made, profile)
    rows = str(pipeline_drawing(timeline, width)).splitlines()[:-3]
    used = {span.rank for span in timeline.spans}
    assert len(rows) == len(used)
    assert {len(row) for row in rows} == {width}


def test_a_drawing_has_colours_where_the_terminal_has():
    """The same characters, with colours around them."""
    console = Console(width=120, force_terminal=True, color_system="256")
    with console.capture() as capture:
        console.print(pipeline_drawing(simulate(PLAN, PROFILE), 110))
    assert "\x1b[" in capture.get()
    assert "\x1b[" not in printed(pipeline_drawing(simulate(PLAN, PROFILE), 110))


def test_what_cannot_be_drawn_is_refused():
    """No spans, or no room."""
    with pytest.raises(InputError, match="no spans"):
        pipeline_drawing(simulate(PLAN, PROFILE, spans=False))
    with pytest.raises(InputError, match="use at least 29"):
        pipeline_drawing(simulate(PLAN, PROFILE), width=20)


def test_a_plan_table_shows_layers_devices_times_and_notes():
    """Devices are shortened to runs, separated by machine."""
    made = plan([10, 6], 16, 2, preset("config-a")).model_copy(update={"notes": ("a caveat",)})
    text = printed(plan_table(made.model_copy(update={"predicted": predict(made, PROFILE)})))
    for words in ("0-7 | 8-9 (10)", "10-15 (6)", "2 s", "unknown", "note: a caveat", "samples/s"):
        assert words in text
    assert "AllReduce" not in printed(plan_table(made))


def test_a_plan_table_shows_shares_of_the_rows():
    """Equal ones once, and the memory of the device that has most."""
    made = plan([3], 16, 2, preset("config-a"))
    (stage,) = made.stages
    stages = (stage.model_copy(update={"rows": (3.0, 3.0, 1.0)}),)
    assert "0-2 (3), rows 2 x 3, 1" in printed(
        plan_table(made.model_copy(update={"stages": stages}))
    )


def test_a_plan_table_shows_the_gap_to_the_lower_bound_and_what_is_simulate_only():
    """In words."""
    predicted = predict(PLAN, PROFILE)
    bound = predicted.step_seconds / 1.25
    update = {"predicted": predicted.model_copy(update={"lower_bound_seconds": bound})}
    text = printed(plan_table(PLAN.model_copy(update={**update, "simulate_only": ("shard",)})))
    assert "at most 25.0 % above the best possible" in text
    assert "can be simulated only, because of: shard" in text


def test_names_with_brackets_are_printed_as_they_are():
    """They are no markup."""
    made = PLAN.model_copy(update={"model": "net[small]", "notes": ("see [3]",)})
    text = printed(plan_table(made))
    assert "net[small]" in text
    assert "see [3]" in text


def test_a_prediction_for_another_number_of_stages_is_left_out():
    """A plan that was edited by hand still prints."""
    plan = predicted_plan()
    assert plan.predicted is not None
    short = plan.predicted.model_copy(update={"stages": plan.predicted.stages[:1]})
    edited = plan.model_copy(update={"predicted": short})
    assert "AllReduce" not in printed(plan_table(edited))
    assert compared_figures(edited, measured(plan, (1, 1, 1)))[2].predicted is None


def measured(plan: Plan, peaks: tuple[int | None, ...]) -> Timeline:
    """A run that took twice as long as predicted."""
    timeline = simulate(plan, PROFILE)
    return timeline.model_copy(
        update={
            "source": "measured",
            "step_seconds": 2 * timeline.step_seconds,
            "peak_bytes": peaks,
        }
    )


def test_figures_are_compared_per_stage_by_its_fullest_rank():
    """Differences are shares of the measurement; what was not measured has none."""
    plan = predicted_plan()
    assert plan.predicted is not None
    stages = tuple(s.model_copy(update={"peak_bytes": 150}) for s in plan.predicted.stages)
    predicted = plan.predicted.model_copy(update={"stages": stages})
    step, bubble, first, last = compared_figures(plan, measured(plan, (80, 100, None)), predicted)
    assert step.difference == pytest.approx(-0.5)
    assert bubble.difference == pytest.approx(bubble.predicted - bubble.measured)
    assert (first.predicted, first.measured, first.difference) == (150, 100, 0.5)
    assert (last.measured, last.difference) == (None, None)


def test_predicted_against_measured_prints_percent():
    """One row per figure."""
    plan = predicted_plan()
    text = printed(predicted_against_measured(plan, measured(plan, (1024, 2048, 1024))))
    for words in ("-50.0 %", "points", "2.0 KiB", "stage 1 peak memory", "measured"):
        assert words in text


def test_comparing_without_a_prediction_is_refused():
    """With the remedy."""
    with pytest.raises(PlanError, match="dapple plan"):
        predicted_against_measured(PLAN, measured(PLAN, ()))


def test_a_trace_has_machines_as_processes_ranks_as_threads_and_microseconds():
    """Complete events for what a rank computes; they never overlap on a thread."""
    timeline = simulate(PLAN, PROFILE)
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    events = trace["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", 2, 0] == "machine 2"
    assert names["thread_name", 1, 1] == "rank 1 (stage 0, replica 1)"
    complete = [e for e in events if e["ph"] == "X"]
    first = min(complete, key=lambda event: (event["tid"], event["ts"]))
    assert (first["name"], first["ts"], first["dur"]) == ("forward 0", 0, 1e6)
    for rank in range(3):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if e["tid"] == rank)
        assert all(b[0] >= a[1] - 1e-3 for a, b in itertools.pairwise(mine))


def test_what_overlaps_computing_is_an_asynchronous_event_of_a_trace():
    """Each has one begin and one end."""
    timeline = simulate(PLAN, PROFILE)
    events = chrome_trace(timeline)["traceEvents"]
    begun, ended = ({e["id"] for e in events if e["ph"] == phase} for phase in "be")
    kinds = ("send", "receive", "allreduce")
    assert begun == ended
    assert len(begun) == sum(span.kind in kinds for span in timeline.spans)


def test_a_trace_of_unknown_machines_is_one_process():
    """A timeline that does not say where its ranks ran."""
    timeline = simulate(PLAN, PROFILE).model_copy(update={"machine_of_rank": ()})
    assert {event["pid"] for event in chrome_trace(timeline)["traceEvents"]} == {0}
