"""A quick guess at the simulated step of one layout, warm-up included, to rank many of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dapple.planner.exposed import bucketed_seconds
from dapple.planner.problem import Layout, Problem


def estimate_seconds(
    problem: Problem,
    layout: Layout,
    warmup: Sequence[int],
    recomputes: Sequence[bool] | None = None,
) -> float:
    """About the seconds of a step, without contention; usually a few per cent too low.

    The largest of, over the stages s and the transfers between them,

        sum_{a<s} F_a + W_s + max(sum_{a<s} B_a + A_0, A_s)       the stage is the bottleneck
        the same with R_s (1 + (M - 1) / K_s) in place of W_s     its warm-up is the bottleneck
        sum_a F_a + sum_{a>=s} B_a + A_s                          one micro-batch's way

    where R_s is the round trip of a micro-batch from stage s to the last one and back: at most
    K_s micro-batches are on it at a time.

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
    trip, trips = 0.0, [0.0] * len(forward)
    for s in range(len(forward) - 1, -1, -1):
        trip += forward[s] + backward[s]
        trips[s] = trip
    before_f = before_b = longest = 0.0
    total_f, total_b = sum(forward), sum(backward)
    for s, own in enumerate(work):
        if s % 2 == 0 and warmup[s // 2] < count:
            own = max(own, trips[s] * (1 + (count - 1) / warmup[s // 2]))
        busy = before_f + own + max(before_b + after[0], after[s])
        longest = max(longest, busy, total_f + total_b - before_b + after[s])
        before_f += forward[s]
        before_b += backward[s]
    return longest


def stage_loads(problem: Problem, layout: Layout) -> list[float]:
    """Seconds that each stage, or the transfer into it, is busy, exposed AllReduce included."""
    *_, work, after = _stage_times(problem, layout)
    own = [w + a for w, a in zip(work[0::2], after[0::2], strict=True)]
    into = [0.0, *work[1::2]]
    return [max(pair) for pair in zip(own, into, strict=True)]


def _stage_times(
    problem: Problem, layout: Layout
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Forward, backward, whole work, and what comes after, of the expanded stages."""
    tables = problem.tables(layout.micro_batches)
    forward: list[float] = []
    backward: list[float] = []
    work: list[float] = []
    after: list[float] = []
    for number, (start, stop) in enumerate(itertools.pairwise(layout.bounds)):
        if number:
            link = tables.link(layout.devices[number - 1], layout.devices[number])
            there, back = float(link.forward[start]), float(link.backward[start])
            forward.append(there)
            backward.append(back)
            work.append(layout.micro_batches * max(there, back))
            after.append(0.0)
        table = tables.stage(layout.devices[number])
        forward.append(float(table.likely_forward[stop] - table.likely_forward[start]))
        backward.append(float(table.likely_backward[stop] - table.likely_backward[start]))
        work.append(float(table.work[stop] - table.work[start]))
        buckets = problem.model.buckets(start, stop)
        ring = table.reduce_fixed, table.reduce_per_byte
        exposed = bucketed_seconds(buckets, table.likely_backward, start, *ring)
        after.append(exposed + float(table.optimizer[stop] - table.optimizer[start]))
    return forward, backward, work, after
