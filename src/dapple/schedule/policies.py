"""Named schedules: early backward (DAPPLE, section 3) and GPipe."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dapple.errors import ScheduleError
from dapple.schedule.actions import Action, Schedule

SCHEDULES = ("early-backward", "gpipe")


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
    counts = [min(k, num_micro_batches) for k in warmup]
    for stage, (before, here) in enumerate(itertools.pairwise(counts), start=1):
        if here > before:
            raise ScheduleError(
                f"stage {stage} warms up {here} micro-batches but stage {stage - 1} only {before}, "
                "which deadlocks; warm-up must not increase along the pipeline"
            )
    return Schedule(
        "early-backward",
        num_micro_batches,
        tuple(_one_forward_one_backward(s, num_micro_batches, k) for s, k in enumerate(counts)),
    )


def gpipe(num_micro_batches: int, num_stages: int) -> Schedule:
    """All forwards, then all backwards in the same order of micro-batches (GPipe, 2019)."""
    rows = tuple(
        tuple(Action(s, "F", m) for m in range(num_micro_batches))
        + tuple(Action(s, "B", m) for m in range(num_micro_batches))
        for s in range(num_stages)
    )
    return Schedule("gpipe", num_micro_batches, rows)


def make_schedule(name: str, num_micro_batches: int, warmup: Sequence[int]) -> Schedule:
    """The named schedule for stages with these warm-up counts.

    Raises:
        ScheduleError: the name is unknown, or the warm-up counts deadlock.
    """
    if name == "early-backward":
        return early_backward(num_micro_batches, warmup)
    if name == "gpipe":
        return gpipe(num_micro_batches, len(warmup))
    raise ScheduleError(f'schedule "{name}" is unknown; known: {", ".join(SCHEDULES)}')


def _one_forward_one_backward(stage: int, total: int, warmup: int) -> tuple[Action, ...]:
    actions = [Action(stage, "F", m) for m in range(warmup)]
    for m in range(total):
        actions.append(Action(stage, "B", m))
        if m + warmup < total:
            actions.append(Action(stage, "F", m + warmup))
    return tuple(actions)
