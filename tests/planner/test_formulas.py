"""Latency formulas against a simulation of the expanded pipeline."""

from __future__ import annotations

import random
import statistics

import pytest

from dapple.planner.formulas import (
    corrected_latency,
    corrected_pivot,
    expand,
    latency,
    paper_latency,
    printed_pivot,
)


def _simulated(
    forward: list[float], backward: list[float], allreduce: list[float], total: int
) -> float:
    """The step with S - s micro-batches in flight, the backward first where both can run."""
    count = len(forward)
    fed = [[0.0] * total if s == 0 else [] for s in range(count)]
    back: list[list[float]] = [[] for _ in range(count)]
    clock = [0.0] * count
    done = [[0, 0] for _ in range(count)]
    while any(b < total for _, b in done):
        options = []
        for s in range(count):
            f, b = done[s]
            returned = back[s][b] if b < len(back[s]) else None
            if returned is not None:
                options.append((max(clock[s], returned), 0, s))
            if f < len(fed[s]) and f - b < count - s:
                options.append((max(clock[s], fed[s][f]), 1, s))
        start, kind, s = min(options)
        clock[s] = start + (forward[s] if kind else backward[s])
        done[s][0 if kind else 1] += 1
        if kind:
            (fed[s + 1] if s + 1 < count else back[s]).append(clock[s])
        elif s:
            back[s - 1].append(clock[s])
    return max(end + reduce for end, reduce in zip(clock, allreduce, strict=True))


def _random(rng: random.Random) -> tuple[list[float], list[float], list[float], int]:
    stages = rng.randint(1, 6)
    forward = expand(
        [rng.uniform(0.5, 2) for _ in range(stages)],
        [rng.uniform(0.01, 0.5) for _ in range(stages - 1)],
    )
    backward = [2 * f if s % 2 == 0 else f for s, f in enumerate(forward)]
    allreduce = [rng.uniform(0, 3) if s % 2 == 0 else 0.0 for s in range(len(forward))]
    return forward, backward, allreduce, rng.choice((4, 8, 16, 32))


def test_corrected_formula_is_close_and_never_over() -> None:
    """On random pipelines on average within 4 %, and never above the simulated step."""
    rng = random.Random(7)
    errors = []
    for _ in range(400):
        pipeline = _random(rng)
        errors.append(corrected_latency(*pipeline) / _simulated(*pipeline) - 1)
    assert max(errors) <= 1e-9
    assert statistics.mean(errors) >= -0.04


def test_printed_pivot_underestimates() -> None:
    """Algorithm 1 as printed is never above the corrected formula, and can be far below."""
    rng = random.Random(8)
    ratios = []
    for _ in range(400):
        pipeline = _random(rng)
        ratios.append(paper_latency(*pipeline) / corrected_latency(*pipeline))
    assert max(ratios) <= 1 + 1e-9
    assert min(ratios) < 0.95


def test_two_equal_stages_by_hand() -> None:
    """Two stages of F = 1, B = 2 with 4 micro-batches: 1 + 4 x 3 + 2."""
    arguments = [1.0, 0.0, 1.0], [2.0, 0.0, 2.0], [0.0, 0.0, 0.0], 4
    assert corrected_latency(*arguments) == 15.0


def test_allreduce_hides_behind_earlier_backwards() -> None:
    """The last stage's AllReduce overlaps the first stage's last backward."""
    forward, backward = [1.0, 0.5, 1.0], [2.0, 0.5, 2.0]
    alone = latency(forward, backward, [0.0, 0.0, 0.0], 4, 2)
    assert latency(forward, backward, [0.0, 0.0, 2.5], 4, 2) == alone
    assert latency(forward, backward, [0.0, 0.0, 3.5], 4, 2) == alone + 1.0
    assert latency(forward, backward, [1.0, 0.0, 0.0], 4, 2) == alone + 1.0


@pytest.mark.parametrize("pivot", [printed_pivot, corrected_pivot])
def test_pivot_of_one_slow_stage(pivot: object) -> None:
    """Both rules agree where one stage dominates."""
    assert callable(pivot)
    assert pivot([1.0, 0.1, 5.0, 0.1, 1.0], [1.0, 0.1, 5.0, 0.1, 1.0], 8) == 2
