"""Schedules as data: their orders, their notation, and the proof that they end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.errors import FileError, ScheduleError
from dapple.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    check_schedule,
    early_backward,
    gpipe,
    interleaved,
    load_schedule,
    make_schedule,
    save_schedule,
    warmup_counts,
    zero_bubble,
)
from dapple.schedule.messages import Link, Room


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


def test_interleaved_passes_groups_of_micro_batches_through_the_stages_of_a_position():
    """Two positions with two stages each, two micro-batches."""
    assert str(interleaved(2, 2, 2)) == (
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1"
    )


def test_interleaved_of_a_single_stage_each_is_early_backward_under_policy_b():
    """2 (S - p) - 1 forwards ahead."""
    deep = early_backward(6, warmup_counts(3, 6, "B"))
    assert interleaved(6, 3, 1).actions == deep.actions


def test_zero_bubble_is_typeset_like_its_docstring():
    """Weight gradients of stage 1 run one micro-batch behind."""
    assert str(zero_bubble(3, (2, 1))) == (
        "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2"
    )


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 11))
def test_virtual_stages_end_for_any_number_of_micro_batches(
    positions: int, virtual: int, micro_batches: int
):
    """Interleaved and GPipe, also where the positions do not divide the micro-batches."""
    for name in ("interleaved", "gpipe"):
        made = make_schedule(name, micro_batches, [1] * positions * virtual, virtual)
        check_schedule(made)
        assert made.stages == tuple(
            tuple(range(p, positions * virtual, positions)) for p in range(positions)
        )


@given(pipelines)
def test_zero_bubble_ends_and_no_stage_holds_more_than_early_backwards_first(
    case: tuple[int, tuple[int, ...]],
):
    """Weight gradients wait, but never so long that memory grows beyond K_0."""
    micro_batches, warmup = case
    first = min(warmup[0], micro_batches)
    check_schedule(zero_bubble(micro_batches, warmup), [first] * len(warmup))


def test_only_schedules_made_for_them_take_virtual_stages():
    """Fact, value, remedy."""
    for name in ("early-backward", "zero-bubble"):
        with pytest.raises(ScheduleError, match=r"the plan has 2; use interleaved or gpipe"):
            make_schedule(name, 4, (1, 1, 1, 1), 2)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_schedules_survive_a_file(positions: int, virtual: int, micro_batches: int):
    """Written and read again, the actions are the same; pauses are left out."""
    made = interleaved(micro_batches, positions, virtual)
    text = str(made).replace(",", ",,") + "\n\n"
    for schedule, body in ((made, text), (zero_bubble(micro_batches, (2, 1)), None)):
        path = Path(__file__).with_name(f"{positions}-{virtual}-{micro_batches}.csv")
        try:
            save_schedule(schedule, path)
            if body is not None:
                path.write_text(body)
            assert load_schedule(path).actions == schedule.actions
            assert load_schedule(path).num_micro_batches == micro_batches
        finally:
            path.unlink()


def test_pytorch_reads_our_cells_and_we_read_its_own():
    """The notation of `torch.distributed.pipelining`, in both directions."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")._Action
    for schedule in (interleaved(3, 2, 2), zero_bubble(3, (2, 1))):
        for action in (action for row in schedule.actions for action in row):
            parsed = theirs.from_str(str(action))
            assert Action.parse(repr(parsed)) == action
            assert (parsed.stage_index, parsed.microbatch_index) == (
                action.stage,
                action.micro_batch,
            )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1SEND_F0,1B0\n", 'row 2, column 2: "1SEND_F0" is no action'),
        ("\n0F0,,(0F1;0B0)OVERLAP_F_B\n", 'row 2, column 3: "(0F1;0B0)OVERLAP_F_B"'),
        (",,\n", "has no actions; write one row per rank"),
    ],
)
def test_a_cell_that_is_no_computation_is_refused_by_row_and_column(
    text: str, message: str, tmp_path: Path
):
    """Communication and overlapped actions follow from the plan, or are not run here."""
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(ScheduleError, match=re.escape(message)):
        load_schedule(tmp_path / "own.csv")
    with pytest.raises(FileError, match="does not exist"):
        load_schedule(tmp_path / "other.csv")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0", "0F0 0B0"), "stage 0 has actions in rows 0 and 1"),
        (("0F0 0B0", "2F0 2B0"), "no row has actions of stage 1"),
        (("0F0 0I0", "1F0 1B0"), "misses 0W0"),
        (("0F0 0B0 0W0", "1F0 1B0"), "has no use for 0B0"),
        (("0F0 0W0 0I0", "1F0 1B0"), "waits at 0W0 for 0I0"),
        (("0F0 2B0 2F0 0B0", "1F0 1B0"), "waits at 2B0 for 2F0"),
    ],
)
def test_faults_of_split_and_virtual_stages_are_named(rows: tuple[str, ...], message: str):
    """A stage in two rows, a gap, half a backward, weights before inputs, backward first."""
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_schedule(schedule_of(*rows, micro_batches=1))


def test_a_message_stuck_behind_another_one_gets_room():
    """First in, first out: gradients of stage 3 stand behind activations that find no room.

    Stage 2 holds one micro-batch and receives one ahead, so that 1F2 would wait until 2B0 has run,
    for which 3B0 comes too late.
    """
    rows = (
        "0F0 0F1 0F2 2F0 2B0 2F1 2B1 2F2 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    )
    schedule = schedule_of(*rows, micro_batches=3)
    assert schedule.in_flight() == (3, 3, 1, 1)
    assert check_schedule(schedule) == Room((3, 3, 2, 1), (2, 2, 2, 2))


@given(pipelines)
def test_one_stage_per_device_needs_no_room_beyond_rules_4_and_5(
    case: tuple[int, tuple[int, ...]],
):
    """K_i and one ahead, and two gradients, also with skips from every stage to every later one."""
    micro_batches, warmup = case
    skips = [Link(a, b) for b in range(len(warmup)) for a in range(b)]
    for name in ("early-backward", "gpipe", "zero-bubble"):
        made = make_schedule(name, micro_batches, warmup)
        assert check_schedule(made, links=skips) == Room.of(made.in_flight())


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9))
def test_interleaved_ends_with_skips_between_all_stages(
    positions: int, virtual: int, micro_batches: int
):
    """Whatever crosses, the order of messages is no deadlock."""
    stages = range(positions * virtual)
    skips = [Link(a, b, (a + b) % 3 > 0) for b in stages for a in range(b)]
    check_schedule(interleaved(micro_batches, positions, virtual), links=skips)


def test_only_stages_that_exchange_tensors_wait_for_each_other():
    """The same deadlock as above, and none where nothing passes between the stages."""
    stuck = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", micro_batches=2)
    with pytest.raises(ScheduleError, match="deadlock"):
        check_schedule(stuck, links=[Link(0, 1)])
    check_schedule(stuck, links=[])


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
