"""Where a stage's step goes: compute, exposed messages and AllReduce, update, bubble."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from rich.console import Console

from dapple.records import ModelProfile, Plan, Span, Timeline
from dapple.reporting.waiting import StageTime, stage_times, waiting_table
from dapple.simulator import simulate
from tests.simulator.pipelines import chain, cluster, plan, random_plans


def test_a_pipeline_by_hand():
    """Two stages, one micro-batch, F 1 s and B 2 s each, 4 bytes a second, messages of 2 bytes.

    stage 0  F 0-1           B 5 to 7 after its gradients came from 4.5 to 5
    stage 1  F 1.5-2.5, its input 0.5 s on the way; B to 4.5
    """
    profile = chain([1, 1], [2, 2], bytes_per_row=2)
    made = plan([1, 1], 1, 1, cluster(2, bandwidth=4))
    first, last = stage_times(simulate(made, profile)).values()
    assert first == pytest.approx(StageTime(3, 0.5, 0, 0, 3.5))
    assert last == pytest.approx(StageTime(3, 0.5, 0, 0, 3.5))


def test_an_allreduce_counts_where_nothing_is_computed():
    """Backward until 5, AllReduce from 4 to 7, update to 8; 2 s of 3 are exposed."""
    rows = [("forward", 0, 0, 2), ("backward", 0, 2, 5), ("allreduce", None, 4, 7)]
    rows.append(("optimizer", None, 7, 8))
    spans = [
        Span(rank=0, stage=0, replica=0, kind=k, micro_batch=m, start=a, end=b)
        for k, m, a, b in rows
    ]
    found = stage_times(Timeline(step_seconds=9, spans=tuple(spans), machine_of_rank=(0,)))
    assert found[0] == StageTime(compute=5, messages=0, allreduce=2, update=1, bubble=1)


@settings(max_examples=100)
@given(random_plans(contended=True))
def test_the_parts_make_up_the_step_and_none_is_negative(case: tuple[Plan, ModelProfile]):
    """For any simulated step, transfers and AllReduces over one another included."""
    made, profile = case
    timeline = simulate(made, profile)
    for row in stage_times(timeline).values():
        assert min(row) >= -1e-9
        assert sum(row) == pytest.approx(timeline.step_seconds, rel=1e-6)


def test_the_table_lays_both_timelines_side_by_side():
    """Shares of each one's own step."""
    profile = chain([1, 1], [2, 2], bytes_per_row=2)
    made = plan([1, 1], 1, 1, cluster(2, bandwidth=4))
    timeline = simulate(made, profile)
    console = Console(width=120, record=True)
    console.print(waiting_table(timeline, timeline.model_copy(update={"source": "measured"})))
    text = console.export_text()
    assert "simulated / measured" in text
    assert "42.9 % / 42.9 %" in text
    console.print(waiting_table(None, timeline))
    assert "7.1 %" in console.export_text()
