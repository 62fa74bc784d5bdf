"""Named schedules: early backward (DAPPLE, section 3), GPipe, interleaved and zero bubble."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from dapple.errors import ScheduleError
from dapple.schedule.actions import Action, Schedule

SCHEDULES = ("early-backward", "gpipe", "interleaved", "zero-bubble")


def warmup_counts(num_stages: int, num_micro_batches: int, policy: str = "A") -> tuple[int, ...]:
    """K_i of the paper's warm-up policies, before memory's cap D.

    Policy A: min(S - i, M), for small transfers. Policy B: min(2 (S - i) - 1, M), where
    transfers count as stages of their own (DAPPLE, section 3).

    >>> warmup_counts(4, 8), warmup_counts(4, 8, "B")
    ((4, 3, 2, 1), (7, 5, 3, 1))
    """
    if policy not in ("A", "B"):
        raise ScheduleError(f'warm-up policy "{policy}" is unknown; use "A" or "B"')
    left = [num_stages - i for i in range(num_stages)]
    return tuple(min(n if policy == "A" else 2 * n - 1, num_micro_batches) for n in left)


def early_backward(num_micro_batches: int, warmup: Sequence[int]) -> Schedule:
    """K_i forwards, then strictly one backward, one forward, then the rest of the backwards.

    With S = 2, M = 4, K = (2, 1):

        stage 0:  F0 F1 B0 F2 B1 F3 B2 B3
        stage 1:     F0 B0 F1 B1 F2 B2 F3 B3

    Args:
        warmup: K_i per stage; capped at M. It must not increase along the pipeline: a later
            stage that waits for more forwards than its predecessor gives would wait for ever.
    """
    counts = _capped(num_micro_batches, warmup)
    return Schedule(
        "early-backward",
        num_micro_batches,
        tuple(_one_forward_one_backward(s, num_micro_batches, k) for s, k in enumerate(counts)),
    )


def gpipe(num_micro_batches: int, num_stages: int, virtual: int = 1) -> Schedule:
    """All forwards, then all backwards in the same order of micro-batches (GPipe, 2019).

    With virtual stages all micro-batches pass one stage of a position before the next.
    """
    positions = num_stages // virtual
    rows = tuple(
        tuple(Action(s, "F", m) for s in own for m in range(num_micro_batches))
        + tuple(Action(s, "B", m) for s in reversed(own) for m in range(num_micro_batches))
        for own in (range(p, num_stages, positions) for p in range(positions))
    )
    return Schedule("gpipe", num_micro_batches, rows)


def interleaved(num_micro_batches: int, num_positions: int, virtual: int) -> Schedule:
    """Early backward over v virtual stages per position (Narayanan et al., SC 2021).

    Stage i runs at position i mod S. Forwards go in groups of S micro-batches: a group passes
    the position's stages one after the other, then comes the next group. Position p does
    2 (S - p - 1) + (v - 1) S forwards, then one forward, one backward in turn, so the bubble of
    early backward shrinks v-fold. With S = 2, v = 2, M = 2:

        position 0:  0F0 0F1 2F0 2F1     2B0 2B1 0B0     0B1
        position 1:      1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Where S does not divide M it is the schedule of the next multiple without the micro-batches
    that do not exist: what is left out holds up no one.
    """
    total = -(-num_micro_batches // num_positions) * num_positions
    rows = []
    for position in range(num_positions):
        own = range(position, num_positions * virtual, num_positions)
        ahead = 2 * (num_positions - position - 1) + (virtual - 1) * num_positions
        forwards = list(_in_groups(own, "F", total, num_positions))
        backwards = list(_in_groups(own[::-1], "B", total, num_positions))
        ahead = min(ahead, len(forwards))
        row = forwards[:ahead]
        for n, backward in enumerate(backwards):
            row += [*forwards[ahead + n : ahead + n + 1], backward]
        rows.append(tuple(a for a in row if a.micro_batch < num_micro_batches))
    return Schedule("interleaved", num_micro_batches, tuple(rows))


def zero_bubble(num_micro_batches: int, warmup: Sequence[int]) -> Schedule:
    """Early backward with split backwards: the weights' gradients wait (Qi et al., ICLR 2024, H1).

    The gradients of the inputs (I) go back at once; those of the weights (W) run K_0 - K_i
    micro-batches behind. So no stage holds more micro-batches than stage 0, and what early
    backward waits for at the step's end is filled. With S = 2, M = 3, K = (2, 1):

        stage 0:  F0 F1    I0 W0 F2 I1 W1 I2 W2
        stage 1:     F0 I0 F1 I1 W0 F2 I2 W1 W2

    Args:
        warmup: K_i per stage, as for early backward.
    """
    counts = _capped(num_micro_batches, warmup)
    rows = []
    for stage, count in enumerate(counts):
        behind = counts[0] - count
        row = []
        for action in _one_forward_one_backward(stage, num_micro_batches, count):
            if action.kind == "F":
                row.append(action)
                continue
            row.append(action._replace(kind="I"))
            if action.micro_batch >= behind:
                row.append(Action(stage, "W", action.micro_batch - behind))
        first = max(0, num_micro_batches - behind)
        row += [Action(stage, "W", m) for m in range(first, num_micro_batches)]
        rows.append(tuple(row))
    return Schedule("zero-bubble", num_micro_batches, tuple(rows))


def make_schedule(
    name: str, num_micro_batches: int, warmup: Sequence[int], virtual: int = 1
) -> Schedule:
    """The named schedule for stages with these warm-up counts.

    Args:
        name: one of `SCHEDULES`.
        num_micro_batches: M.
        warmup: K_i per stage; only early backward and zero bubble look at more than their number.
        virtual: stages per position.

    Raises:
        ScheduleError: the name is unknown, the warm-up counts deadlock, or the schedule has no
            use for virtual stages.
    """
    if name == "gpipe":
        return gpipe(num_micro_batches, len(warmup), virtual)
    if name == "interleaved":
        return interleaved(num_micro_batches, len(warmup) // virtual, virtual)
    if name not in SCHEDULES:
        raise ScheduleError(f'schedule "{name}" is unknown; known: {", ".join(SCHEDULES)}')
    if virtual != 1:
        raise ScheduleError(
            f"{name} runs one stage per device, but the plan has {virtual}; use interleaved or gpipe"
        )
    make = early_backward if name == "early-backward" else zero_bubble
    return make(num_micro_batches, warmup)


def _capped(num_micro_batches: int, warmup: Sequence[int]) -> list[int]:
    counts = [min(k, num_micro_batches) for k in warmup]
    for stage, (before, here) in enumerate(itertools.pairwise(counts), start=1):
        if here > before:
            raise ScheduleError(
                f"stage {stage} warms up {here} micro-batches but stage {stage - 1} only {before}, "
                "which deadlocks; warm-up must not increase along the pipeline"
            )
    return counts


def _one_forward_one_backward(stage: int, total: int, warmup: int) -> tuple[Action, ...]:
    actions = [Action(stage, "F", m) for m in range(warmup)]
    for m in range(total):
        actions.append(Action(stage, "B", m))
        if m + warmup < total:
            actions.append(Action(stage, "F", m + warmup))
    return tuple(actions)


def _in_groups(stages: Sequence[int], kind: str, total: int, size: int) -> Iterator[Action]:
    for start in range(0, total, size):
        for stage in stages:
            for micro_batch in range(start, start + size):
                yield Action(stage, "F" if kind == "F" else "B", micro_batch)
