"""Schedules as data: their orders, their notation, and the proof that they end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple.errors import ScheduleError
from dapple.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    check_schedule,
    early_backward,
    gpipe,
    make_schedule,
    warmup_counts,
)


def schedule_of(*rows: str, micro_batches: int) -> Schedule:
    """A schedule written out by hand."""
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("by hand", micro_batches, actions)


def non_increasing(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """M and warm-up counts that a pipeline may have."""
    warmup = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    return draw(st.integers(1, 12)), tuple(sorted(warmup, reverse=True))


pipelines = st.composite(non_increasing)()


def test_early_backward_is_typeset_like_its_docstring():
    """Two stages, four micro-batches, K = (2, 1)."""
    assert str(early_backward(4, (2, 1))) == (
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"
    )


def test_gpipe_runs_all_forwards_and_then_all_backwards():
    """Both in the order of micro-batches."""
    assert str(gpipe(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"


def test_warm_up_policies_are_the_papers():
    """A: S - i. B: 2 (S - i) - 1. Both at most M."""
    assert warmup_counts(4, 8) == (4, 3, 2, 1)
    assert warmup_counts(4, 8, "B") == (7, 5, 3, 1)
    assert warmup_counts(4, 2, "B") == (2, 2, 2, 1)
    with pytest.raises(ScheduleError, match='policy "C" is unknown'):
        warmup_counts(4, 8, "C")


@given(pipelines)
def test_named_schedules_pair_up_end_and_keep_their_bounds(case: tuple[int, tuple[int, ...]]):
    """Early backward holds min(K_i, M) micro-batches, GPipe M."""
    micro_batches, warmup = case
    early = make_schedule("early-backward", micro_batches, warmup)
    check_schedule(early, [min(k, micro_batches) for k in warmup])
    assert early.in_flight() == tuple(min(k, micro_batches) for k in warmup)
    check_schedule(make_schedule("gpipe", micro_batches, warmup), [micro_batches] * len(warmup))


@given(pipelines)
def test_notation_round_trips(case: tuple[int, tuple[int, ...]]):
    """Printed and parsed again, an action is the same."""
    for row in early_backward(*case).actions:
        assert tuple(Action.parse(str(action)) for action in row) == row


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "0F0B", "-1F0", "0f0"])
def test_what_is_no_action_is_refused(text: str):
    """With the notation as the remedy."""
    with pytest.raises(ScheduleError, match="write it like"):
        Action.parse(text)


def test_warm_up_that_increases_is_refused_before_it_deadlocks():
    """K = (1, 2): stage 1 would wait for a second forward that stage 0 never gives."""
    with pytest.raises(ScheduleError, match=r"stage 1 warms up 2 .* stage 0 only 1"):
        early_backward(4, (1, 2))
    early_backward(1, (1, 2))


def test_a_deadlock_is_found_in_a_schedule_built_by_hand():
    """The same K = (1, 2), written out."""
    stuck = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", micro_batches=2)
    with pytest.raises(ScheduleError, match="stage 0 waits at 0B0 for 1B0 for ever"):
        check_schedule(stuck)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0B0 0F1", "misses 0B1"),
        ("0F0 0B0 0F1 0B1 0F2", "has no use for 0F2"),
        ("0F0 0B0 0F1 0B1 0F1", "computes 0F1 twice"),
        ("0F1 0F0 0B0 0B1", "F actions in the order [1, 0]"),
        ("0F0 0F1 0B1 0B0", "B actions in the order [1, 0]"),
        ("0B0 0F0 0F1 0B1", "waits at 0B0 for 0F0"),
    ],
)
def test_faults_are_named_with_stage_and_action(row: str, message: str):
    """Lost, superfluous, doubled, out of order, backward before forward."""
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_schedule(schedule_of(row, micro_batches=2))


def test_too_many_micro_batches_in_flight_are_refused():
    """GPipe under early backward's bound."""
    with pytest.raises(ScheduleError, match=r"stage 1 holds 4 .* its bound is 1"):
        check_schedule(gpipe(4, 2), [4, 1])


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    """Fact, value, remedy."""
    with pytest.raises(ScheduleError, match=f'"zig-zag" is unknown; known: {", ".join(SCHEDULES)}'):
        make_schedule("zig-zag", 1, (1,))
