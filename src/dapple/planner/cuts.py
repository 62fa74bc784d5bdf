"""The estimate of many cuts of one layout at once, and better cuts by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dapple.planner.estimate import spans, waiting_chain
from dapple.planner.problem import WIDE, Layout, Problem
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats
from dapple.planner.warmup import falling_counts

_NEAR = np.array([-2, -1, 0, 1, 2])
_FAR = np.array([-16, -12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 16])
"""How far, in layers, cuts are moved; two at a time only near by in pipelines of many stages."""
_SHORT = 8
_ROUNDS, _LONG_ROUNDS = 10, 3
"""How many moves in a row, and in longer pipelines."""


def estimate_cuts(
    problem: Problem, layout: Layout, bounds: Ints, policies: Sequence[str]
) -> Floats:
    """`estimate_seconds` for other cuts and policies of a layout, without recomputation.

    AllReduces are not cut into buckets here, so that a stage's can end a little too soon.

    Args:
        problem: what is planned.
        layout: devices and M.
        bounds: shape (P, S + 1), cuts from 0 to N, ascending.
        policies: W warm-up policies.

    Returns:
        Shape (W, P), seconds; infinite where the layout does not fit.
    """
    forward, backward, work, after = _times(problem, layout, bounds)
    both = forward + backward
    before_f = np.cumsum(forward, axis=0) - forward
    before_b = np.cumsum(backward, axis=0) - backward
    late = before_f + np.maximum(before_b + after[0], after)
    alone = (both.sum(axis=0) - before_b + after).max(axis=0)
    longest = np.maximum(alone, (work + late).max(axis=0))
    results = []
    rooms = _rooms(problem, layout, bounds) if problem.memory_is_known else None
    for policy in policies:
        warmup = _warmups(problem, replace(layout, policy=policy), rooms)
        waits = _waits(forward, both, warmup, layout.micro_batches) + late[::2]
        step = np.maximum(longest, waits.max(axis=0))
        results.append(np.where(warmup.min(axis=0) > 0, step, np.inf))
    return np.array(results)


def _waits(forward: Floats, both: Floats, warmup: Ints, count: int) -> Floats:
    """C_s of the estimate, shape (S, P); 0 where warm-up is no limit."""
    stages = len(warmup)
    passed = np.concatenate([np.zeros((1, both.shape[1])), np.cumsum(both, axis=0)])
    waits = np.zeros((stages, both.shape[1]))
    for span in spans(stages):
        first, rounds = waiting_chain(warmup[: stages - span], warmup[span:], count)
        trips = passed[2 * span + 1 :: 2] - passed[: -1 - 2 * span : 2]
        chains = first * forward[: len(forward) - 2 * span : 2] + rounds * trips
        np.maximum(waits[: stages - span], chains, out=waits[: stages - span])
    waits += passed[-1] - passed[:-1:2]
    return np.where(warmup < count, waits, 0.0)


def better_cuts(
    problem: Problem, layout: Layout, policies: Sequence[str], rounds: int = _ROUNDS
) -> tuple[float, Layout]:
    """The layout with cuts moved, one or two neighbouring ones at a time, while that helps.

    Args:
        problem: what is planned.
        layout: where to begin.
        policies: warm-up policies to choose from.
        rounds: how many moves in a row.

    Returns:
        Its estimate in seconds, infinite if nothing near it fits, and itself.
    """
    here, seconds, chosen = np.array(layout.bounds), np.inf, 0
    most = rounds if layout.num_stages <= _SHORT else _LONG_ROUNDS
    for _ in range(min(rounds, most)):
        nearby = _moved(here)
        guesses = estimate_cuts(problem, layout, nearby, policies)
        policy, best = divmod(int(guesses.argmin()), len(nearby))
        if not guesses[policy, best] < seconds * (1 - 1e-9):
            break
        here, seconds, chosen = nearby[best], float(guesses[policy, best]), policy
    bounds = tuple(map(int, here))
    return seconds, replace(layout, bounds=bounds, policy=policies[chosen])


def _moved(here: Ints) -> Ints:
    """The cuts as they are, first, and all moves of one cut or of two neighbouring ones."""
    stages = len(here) - 1
    far = _FAR if stages <= _SHORT else _NEAR
    pairs = np.stack(np.meshgrid(far, far, indexing="ij"), axis=-1).reshape(-1, 2)
    moves = [np.zeros((1, len(here)), dtype=np.int64)]
    for cut in range(1, stages):
        single = np.zeros((len(_FAR), len(here)), dtype=np.int64)
        single[:, cut] = _FAR
        moves.append(single)
        if cut + 1 < stages:
            double = np.zeros((len(pairs), len(here)), dtype=np.int64)
            double[:, cut : cut + 2] = pairs
            moves.append(double)
    nearby: Ints = here + np.concatenate(moves)
    return nearby[(np.diff(nearby, axis=1) > 0).all(axis=1)]


def _times(problem: Problem, layout: Layout, bounds: Ints) -> tuple[Floats, Floats, Floats, Floats]:
    """Forward, backward, whole work, and what comes after, of the expanded stages; (2 S - 1, P)."""
    tables, count = problem.tables(layout.micro_batches), layout.micro_batches
    shape = 2 * layout.num_stages - 1, len(bounds)
    forward, backward, work, after = (np.zeros(shape) for _ in range(4))
    for number, devices in enumerate(layout.devices):
        start, stop, row = bounds[:, number], bounds[:, number + 1], 2 * number
        if number:
            link = tables.link(layout.devices[number - 1], devices)
            forward[row - 1], backward[row - 1] = link.forward[start], link.backward[start]
            work[row - 1] = count * np.maximum(forward[row - 1], backward[row - 1])
        table = tables.stage(devices)
        forward[row] = table.likely_forward[stop] - table.likely_forward[start]
        backward[row] = table.likely_backward[stop] - table.likely_backward[start]
        work[row] = table.work[stop] - table.work[start]
        after[row] = tables.likely_exposed(devices, start, stop)
        after[row] += table.optimizer[stop] - table.optimizer[start]
    return forward, backward, work, after


def _rooms(problem: Problem, layout: Layout, bounds: Ints) -> Floats:
    """How many micro-batches fit in flight, shape (S, P)."""
    tables = problem.tables(layout.micro_batches)
    rooms = np.empty((layout.num_stages, len(bounds)))
    for number, devices in enumerate(layout.devices):
        start, stop = bounds[:, number], bounds[:, number + 1]
        factor = problem.state_factor(len(devices), layout.shard)
        rooms[number] = np.inf
        for rows, memory in tables.splits.loads(devices):
            fixed, each = tables.stage_bytes(start, stop, rows, factor)
            rooms[number] = np.minimum(rooms[number], (memory - fixed) / np.maximum(each, 1.0))
    return rooms


def _warmups(problem: Problem, layout: Layout, rooms: Floats | None) -> Ints:
    """`Problem.guess_warmup` for all cuts, shape (S, P); 0 where a stage does not fit.

    Shape (S, 1) if they are the same for all.
    """
    whole = problem.schedule == "gpipe"
    wanted = np.array(problem.wanted_warmup(layout))[:, None]
    if rooms is None or (rooms >= wanted).all():
        return wanted
    if layout.policy == WIDE and not whole:
        first = np.minimum(rooms[0], wanted[0]).astype(np.int64)
        falling = np.array(falling_counts(first, layout.num_stages))
        wanted = np.where(first < wanted[0], np.minimum(wanted, falling), wanted)
    counts = np.minimum.accumulate(np.minimum(rooms, wanted).astype(np.int64), axis=0)
    short = rooms < (wanted if whole else 1)
    return np.where(short.any(axis=0), 0, counts)
