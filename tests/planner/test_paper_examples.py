"""The paper's uneven split: what takes 6 units cut evenly takes 5.33 cut 4:2."""

from __future__ import annotations

import pytest
from benchmarks.paper.examples import six_layers, split_units, two_devices

from dapple.planner import search


def test_an_uneven_split_is_faster_than_the_even_one() -> None:
    """Two stages with two micro-batches: 3:3 takes 6 units, 4:2 takes 5.33 (DAPPLE, section 4)."""
    assert split_units(3) == pytest.approx(6.0)
    assert split_units(4) == pytest.approx(16 / 3)


def test_the_planner_finds_the_uneven_split() -> None:
    """With two micro-batches of one row, which replicas cannot share, it cuts after four of six."""
    plan = search(six_layers(), two_devices(), 2, micro_batch_size=1).plan
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 4), (4, 6)]
    assert plan.predicted is not None
    assert plan.predicted.step_seconds == pytest.approx(16 / 3)
