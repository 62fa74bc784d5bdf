"""A quick guess at the simulated step of one layout, warm-up included, to rank many of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TypeVar

from dapple.planner.exposed import bucketed_seconds
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem
from dapple.planner.tables import CostTables, Ints, StageTimes, shared_update
from dapple.planner.traffic import Devices

_LONG = 10
"""In pipelines of more stages, only so many of the slowest ones are changed."""
_SPANS = 5
"""In pipelines of more stages, only some distances between stages are looked at."""


def estimate_seconds(
    problem: Problem,
    layout: Layout,
    warmup: Sequence[int],
    recomputes: Sequence[bool] | None = None,
) -> float:
    """About the seconds of a step, without contention; usually a few per cent too low.

    The largest of, over the stages s and the transfers between them,

        sum_{a<s} F_a + W_s + late_s            the stage is the bottleneck
        sum_{a<s} F_a + C_s + late_s            its warm-up is the bottleneck
        sum_a F_a + sum_{a>=s} B_a + A_s        one micro-batch's way

    with late_s = max(sum_{a<s} B_a + A_0, A_s). C_s follows from what `waiting_chain` says: with
    R(s, j) = sum_{a=s..j} (F_a + B_a), the round trip of a micro-batch from s to j and back,

        C_s = max_{j>=s} (first F_s + rounds R(s, j)) + R(s, last)

    Args:
        problem: what is planned.
        layout: cuts, devices and M.
        warmup: K_s per stage.
        recomputes: which stages run their forwards again; None: none.
    """
    forward, backward, work, after = _stage_times(problem, layout)
    count = layout.micro_batches
    for s, again in enumerate(recomputes or ()):
        if again:
            backward[2 * s] += forward[2 * s]
            work[2 * s] += count * forward[2 * s]
    passed = list(itertools.accumulate(map(operator.add, forward, backward), initial=0.0))
    reach = spans(layout.num_stages)
    before_f = before_b = longest = 0.0
    total_f, total_b = sum(forward), sum(backward)
    for s, own in enumerate(work):
        if s % 2 == 0 and warmup[s // 2] < count:
            waits = 0.0
            for span in reach:
                j = s + 2 * span
                if j >= len(work):
                    break
                first, rounds = waiting_chain(warmup[s // 2], warmup[j // 2], count)
                chain = first * forward[s] + rounds * (passed[j + 1] - passed[s])
                if chain > waits:
                    waits = chain
            own = max(own, waits + passed[-1] - passed[s])
        busy = before_f + own + max(before_b + after[0], after[s])
        longest = max(longest, busy, total_f + total_b - before_b + after[s])
        before_f += forward[s]
        before_b += backward[s]
    return longest


Count = TypeVar("Count", int, Ints)


def waiting_chain(own: Count, later: Count, micro_batches: int) -> tuple[Count, Count]:
    """How often a stage's warm-up makes its last micro-batch wait for a later stage.

    Stage s begins micro-batch m when the backward of m - K_s is done. Stage j runs that backward
    after its forward of m - K_s + K_j - 1, which begins after stage s has sent it. So micro-batch
    m begins at least a round trip from s to j after m - (K_s - K_j + 1), for all m >= K_s.

    Args:
        own: K_s < M.
        later: K_j <= K_s of the same stage or a later one.
        micro_batches: M.

    Returns:
        The first micro-batch of the chain that ends with M - 1, and its number of round trips.

    >>> waiting_chain(2, 1, 8)  # 7 waits for 5, 5 for 3, 3 for 1
    (1, 3)
    """
    step = own - later + 1
    rounds = (micro_batches - 1 - own) // step + 1
    return micro_batches - 1 - rounds * step, rounds


def spans(stages: int) -> list[int]:
    """How far apart the stages are whose waiting is looked at: all distances if they are few."""
    few = range(min(stages, _SPANS))
    wide = itertools.takewhile(lambda d: d < stages, (_SPANS * 3**k // 2**k for k in range(99)))
    return sorted({*few, *wide, stages - 1})


def slowest_stages(problem: Problem, layout: Layout) -> list[int]:
    """All stages, or the slowest of a long pipeline, with their AllReduces and transfers."""
    if layout.num_stages <= _LONG:
        return list(range(layout.num_stages))
    *_, work, after = _stage_times(problem, layout)
    own = [w + a for w, a in zip(work[0::2], after[0::2], strict=True)]
    loads = list(map(max, own, [0.0, *work[1::2]]))
    return sorted(sorted(range(layout.num_stages), key=lambda s: (-loads[s], s))[:_LONG])


def _stage_times(
    problem: Problem, layout: Layout
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Forward, backward, whole work, and what comes after, of the expanded stages."""
    tables = problem.tables(layout.micro_batches)
    times: list[StageTimes] = []
    for number, (start, stop) in enumerate(itertools.pairwise(layout.bounds)):
        devices = layout.devices[number]
        if number:
            link = tables.link(layout.devices[number - 1], devices)
            there, back = float(link.forward[start]), float(link.backward[start])
            times.append((there, back, layout.micro_batches * max(there, back), 0.0))
        key = devices, start, stop, layout.shard
        found = tables.stage_times.get(key)
        if found is None:
            found = tables.stage_times[key] = _times_of_stage(problem, tables, *key)
        times.append(found)
    forward, backward, work, after = map(list, zip(*times, strict=True))
    return forward, backward, work, after


def _times_of_stage(
    problem: Problem, tables: CostTables, devices: Devices, start: int, stop: int, shard: bool
) -> StageTimes:
    table = tables.stage(devices)
    buckets = problem.model.buckets(start, stop)
    ring = table.reduce_fixed, table.reduce_per_byte
    exposed = bucketed_seconds(buckets, table.likely_backward, start, *ring)
    update = float(table.optimizer[stop] - table.optimizer[start])
    if shard:
        whole = ring[0] + ring[1] * sum(size for _, size in buckets)
        update = float(shared_update(update, len(devices), whole))
    return (
        float(table.likely_forward[stop] - table.likely_forward[start]),
        float(table.likely_backward[stop] - table.likely_backward[start]),
        float(table.work[stop] - table.work[start]),
        exposed + update,
    )
