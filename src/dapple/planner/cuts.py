"""The estimate of many layouts of one length at once, and better cuts by it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dapple.planner.estimate import spans, waiting_chain
from dapple.planner.layout import WIDE, Layout
from dapple.planner.moves import Around, Places, longest_work
from dapple.planner.problem import Problem
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats
from dapple.planner.warmup import falling_counts

_NEAR = np.array([-2, -1, 0, 1, 2])
_FAR = np.array([-16, -12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 16])
"""How far, in layers, cuts are moved; two at a time only near by in pipelines of many stages."""
_SHORT = 8
_ROUNDS, _LONG_ROUNDS = 10, 3
"""How many moves in a row, and in longer pipelines."""


def estimate_all(
    problem: Problem, layouts: Sequence[Layout], which: Ints, bounds: Ints, policies: Sequence[str]
) -> Floats:
    """`estimate_seconds` for cuts of some layouts of the same length and M, without recomputation.

    AllReduces are not cut into buckets here, so that a stage's can end a little too soon.

    Args:
        problem: what is planned.
        layouts: device sets and M.
        which: shape (P,), indices into `layouts`.
        bounds: shape (P, S + 1), cuts from 0 to N, ascending.
        policies: W warm-up policies.

    Returns:
        Shape (W, P), seconds; infinite where the layout does not fit.
    """
    return _estimate(problem, layouts[0], Places.of(problem, layouts), which, bounds, policies)


def _estimate(
    problem: Problem,
    one: Layout,
    places: Places,
    which: Ints,
    bounds: Ints,
    policies: Sequence[str],
) -> Floats:
    """The same for layouts of which one is given and of all the places."""
    cuts, stage = bounds.T, places.stage[:, which]
    times = places.seconds(stage, places.link[:, which], cuts)
    forward, backward = times[:2]
    passed = np.zeros((len(forward) + 1, len(bounds)))
    np.cumsum(forward + backward, axis=0, out=passed[1:])
    (late, longest), rooms = longest_work(times), None
    if problem.memory_is_known:
        state = problem.optimizer_state_factor
        rooms = places.bank.room(stage, cuts[:-1], cuts[1:], state, one.shard)
    results = []
    for policy in policies:
        warmup = _warmups(problem, one, policy, rooms)
        waits = _waits(forward[::2], passed, warmup, places.count) + late[::2]
        step = np.maximum(longest, waits.max(axis=0))
        results.append(np.where(warmup.min(axis=0) > 0, step, np.inf))
    return np.array(results)


def _waits(forward: Floats, passed: Floats, warmup: Ints, count: int) -> Floats:
    """C_s of the estimate, shape (S, P); 0 where warm-up is no limit.

    Args:
        forward: shape (S, P), of the stages.
        passed: shape (2 S, P), a micro-batch's way there and back before each stage and transfer.
        warmup: shape (S, P) or (S, 1).
        count: M.
    """
    stages = len(warmup)
    waits = np.zeros_like(forward)
    for span in spans(stages):
        first, rounds = waiting_chain(warmup[: stages - span], warmup[span:], count)
        trips = passed[2 * span + 1 :: 2] - passed[: -1 - 2 * span : 2]
        chains = first * forward[: stages - span] + rounds * trips
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
    most = rounds if layout.num_stages <= _SHORT else min(rounds, _LONG_ROUNDS)
    seconds, best = _climb_cuts(problem, [layout], policies, most, 1)[0]
    for _ in range(most):
        if layout.num_stages < 3:
            break
        found, other = _climb_cuts(problem, [best], policies, 1, 2)[0]
        if not found < seconds * (1 - 1e-9):
            break
        seconds, best = _climb_cuts(problem, [other], policies, most, 1)[0]
    return seconds, best


def better_cuts_of_all(
    problem: Problem, layouts: Sequence[Layout], policies: Sequence[str], rounds: int
) -> list[tuple[float, Layout]]:
    """`better_cuts` of many layouts, one cut at a time; in their order."""
    found: dict[int, tuple[float, Layout]] = {}
    alike: dict[tuple[int, int], list[int]] = {}
    for number, layout in enumerate(layouts):
        alike.setdefault((layout.num_stages, layout.micro_batches), []).append(number)
    for numbers in alike.values():
        group = [layouts[number] for number in numbers]
        better = _climb_cuts(problem, group, policies, rounds, 1)
        found.update(zip(numbers, better, strict=True))
    return [found[number] for number in range(len(layouts))]


def _climb_cuts(
    problem: Problem, layouts: Sequence[Layout], policies: Sequence[str], rounds: int, apart: int
) -> list[tuple[float, Layout]]:
    """Layouts of one length and M after the best of some moves each, while they help one.

    A search comes by the same layouts again and again.

    Args:
        problem, layouts, policies, rounds: as above.
        apart: how many cuts are moved at once, 1 or 2.
    """
    key = tuple(layouts), tuple(policies), rounds, apart
    known = problem.better_cuts
    if key not in known:
        moves = (_single if apart == 1 else _double)(layouts[0].num_stages)
        known[key] = _climbed(problem, layouts, policies, rounds, moves)
    return known[key]


def _climbed(
    problem: Problem,
    layouts: Sequence[Layout],
    policies: Sequence[str],
    rounds: int,
    moves: Ints,
) -> list[tuple[float, Layout]]:
    here, moving = np.array([layout.bounds for layout in layouts]), np.arange(len(layouts))
    one, places = layouts[0], Places.of(problem, layouts)
    guesses = _estimate(problem, one, places, moving, here, policies)
    seconds, chosen = guesses.min(axis=0), guesses.argmin(axis=0)
    changed = moves != 0
    first, stages = np.maximum(changed.argmax(axis=1) - 1, 0), int(changed.sum(axis=1).max()) + 1
    for _ in range(rounds if stages > 1 else 0):
        nearby = here[moving, None] + moves
        row, move = np.nonzero((np.diff(nearby) > 0).all(axis=2))
        bounds, which = nearby[row, move], moving[row]
        if one.num_stages > 2 * stages:
            around = Around(places, here).longest_work(which, bounds, first[move], stages)
            # No move stays, so that there is one of every layout.
            useful = (around < seconds[which]) | (move == 0)
            row, bounds, which = row[useful], bounds[useful], which[useful]
        guesses = _estimate(problem, one, places, which, bounds, policies)
        policy, least = guesses.argmin(axis=0), guesses.min(axis=0)
        begins = [*np.searchsorted(row, np.arange(len(moving))).tolist(), len(row)]
        best = np.array([a + least[a:b].argmin() for a, b in itertools.pairwise(begins)])
        better = least[best] < seconds[moving] * (1 - 1e-9)
        moving, best = moving[better], best[better]
        here[moving], seconds[moving], chosen[moving] = bounds[best], least[best], policy[best]
        if not len(moving):
            break
    return [
        (float(s), replace(layout, bounds=tuple(cuts), policy=policies[policy]))
        for layout, cuts, s, policy in zip(
            layouts, here.tolist(), seconds, chosen.tolist(), strict=True
        )
    ]


@functools.lru_cache(maxsize=64)
def _single(stages: int) -> Ints:
    """No move, first, and all moves of one cut; shape (moves, S + 1)."""
    moves = [np.zeros((1, stages + 1), dtype=np.int64)]
    for cut in range(1, stages):
        single = np.zeros((len(_FAR) - 1, stages + 1), dtype=np.int64)
        single[:, cut] = _FAR[_FAR != 0]
        moves.append(single)
    return np.concatenate(moves)


@functools.lru_cache(maxsize=64)
def _double(stages: int) -> Ints:
    """No move, first, and all moves of two neighbouring cuts."""
    far = _FAR if stages <= _SHORT else _NEAR
    pairs = np.stack(np.meshgrid(far, far, indexing="ij"), axis=-1).reshape(-1, 2)
    pairs = pairs[pairs.all(axis=1)]
    moves = np.zeros((stages - 2, len(pairs), stages + 1), dtype=np.int64)
    for cut in range(1, stages - 1):
        moves[cut - 1, :, cut : cut + 2] = pairs
    return np.concatenate(
        [np.zeros((1, stages + 1), dtype=np.int64), moves.reshape(-1, stages + 1)]
    )


def _warmups(problem: Problem, layout: Layout, policy: str, rooms: Floats | None) -> Ints:
    """`Problem.guess_warmup` for all cuts, shape (S, P); 0 where a stage does not fit.

    Shape (S, 1) if they are the same for all.
    """
    whole = problem.schedule == "gpipe"
    wanted = np.array(problem.wanted_warmup(layout, policy))[:, None]
    if rooms is None or (rooms >= wanted).all():
        return wanted
    if policy == WIDE and not whole:
        first = np.minimum(rooms[0], wanted[0]).astype(np.int64)
        falling = np.array(falling_counts(first, layout.num_stages))
        wanted = np.where(first < wanted[0], np.minimum(wanted, falling), wanted)
    counts = np.minimum.accumulate(np.minimum(rooms, wanted).astype(np.int64), axis=0)
    short = rooms < (wanted if whole else 1)
    return np.where(short.any(axis=0), 0, counts)
