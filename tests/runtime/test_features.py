"""Every two features of training, together, give the numbers of one process."""

from __future__ import annotations

import pytest

from tests.runtime import cases
from tests.runtime.features import FACTORS, RUNS, Features, error, refused, row_of
from tests.runtime.pairwise import all_pairs, pairs_of


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.model}-{run.schedule[0]}")
def test_features_together_equal_one_process(run: Features) -> None:
    """Weights, buffers and losses, over a batch of the plan's size and one of another."""
    assert error(run) < cases.TOLERANCE


def test_the_runs_bring_every_two_together() -> None:
    """Schedules, recompute, sharded state, shares, clipping, accumulation, own rows, models."""
    seen = {pair for run in RUNS for pair in pairs_of(row_of(run), FACTORS)}
    assert seen == {pair for pair in all_pairs(FACTORS) if not refused(*pair)}
    assert len(RUNS) <= 48
