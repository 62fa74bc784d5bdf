"""Warm-up counts tuned to one plan: the fewest micro-batches in flight with the shortest step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dapple.planner.tables import Ints
from dapple.records import StagePlan

Count = TypeVar("Count", int, Ints)
Seconds = Callable[[tuple[StagePlan, ...]], float]
_SAME = 1e-9


def tune_warmup(
    stages: tuple[StagePlan, ...], most: Sequence[int], step_seconds: Seconds
) -> tuple[tuple[StagePlan, ...], float]:
    """The smallest K_i per stage with which the simulated step is best.

    First `raise_warmup`. Then, stage by stage from the last, the least count that leaves the step
    as it is.

    Args:
        stages: a plan's stages with the counts to start from.
        most: per stage the most micro-batches that fit, at most M.
        step_seconds: the simulator.

    Returns:
        The stages and their step in seconds.
    """
    best, seconds = raise_warmup(stages, most, step_seconds)
    before = None
    while before != best:  # A count can be bounded by the next stage's until that is lowered.
        before = best
        for number in reversed(range(len(best))):
            best = _lowered(best, number, seconds, step_seconds)
    return best, step_seconds(best)


def raise_warmup(
    stages: tuple[StagePlan, ...], most: Sequence[int], step_seconds: Seconds
) -> tuple[tuple[StagePlan, ...], float]:
    """The best of a few K_i, in five simulations.

    The given counts, twice them, as many as memory holds, and counts that fall evenly, or as fast
    as memory makes them, from those of the first stage: a stage that may run no further ahead than
    the next one waits for it, a micro-batch at a time.

    Args, Returns: as `tune_warmup`.
    """
    best, seconds = stages, step_seconds(stages)
    given = [stage.warmup for stage in stages]
    falling = falling_counts(most[0], len(most))
    for counts in ([2 * k for k in given], most, falling, steep_counts(most)):
        raised = with_counts(stages, _never_increasing(counts, most))
        found = step_seconds(raised)
        if found < seconds * (1 - _SAME):
            best, seconds = raised, found
    return best, seconds


def _lowered(
    stages: tuple[StagePlan, ...], number: int, seconds: float, step_seconds: Seconds
) -> tuple[StagePlan, ...]:
    """The stages with the least count at one of them that keeps the step."""
    low = stages[number + 1].warmup if number + 1 < len(stages) else 1
    counts = [stage.warmup for stage in stages]

    def tried(count: int) -> tuple[StagePlan, ...]:
        return with_counts(stages, [*counts[:number], count, *counts[number + 1 :]])

    high = counts[number]
    if low < high and step_seconds(tried(high - 1)) > seconds * (1 + _SAME):
        return stages
    while low < high:
        middle = (low + high) // 2
        if step_seconds(tried(middle)) <= seconds * (1 + _SAME):
            high = middle
        else:
            low = middle + 1
    return tried(high)


def falling_counts(first: Count, stages: int) -> list[Count]:
    """From the first stage's count down to 1 in steps as equal as possible.

    >>> falling_counts(3, 5)
    [3, 3, 2, 2, 1]
    """
    last = max(stages - 1, 1)
    return [1 + -(-(first - 1) * (last - number) // last) for number in range(stages)]


def steep_counts(most: Sequence[int]) -> list[int]:
    """As many as fit of policy B's counts, with each stage's at least one below the one before.

    >>> steep_counts([9, 4, 9, 9])
    [7, 4, 3, 1]
    """
    counts: list[int] = []
    for number, room in enumerate(most):
        below = counts[-1] - 1 if counts else room
        counts.append(max(1, min(room, below, 2 * (len(most) - number) - 1)))
    return counts


def _never_increasing(counts: Sequence[int], most: Sequence[int]) -> list[int]:
    result: list[int] = []
    for count, cap in zip(counts, most, strict=True):
        result.append(max(1, min(count, cap, result[-1] if result else cap)))
    return result


def with_counts(stages: tuple[StagePlan, ...], counts: Sequence[int]) -> tuple[StagePlan, ...]:
    """The stages with these warm-up counts."""
    return tuple(
        stage.model_copy(update={"warmup": count})
        for stage, count in zip(stages, counts, strict=True)
    )
