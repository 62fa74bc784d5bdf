"""The paper's schedule figures show what the paper shows with them."""

from __future__ import annotations

import pytest
from benchmarks.paper import figures

from tests.docs.blocks import ROOT


def test_early_backward_takes_gpipes_time_with_less_in_memory() -> None:
    """The same bubble for the same partition and M; S micro-batches held for M."""
    gpipe, early = figures.gpipe_and_early_backward().values()
    assert early.step_seconds == pytest.approx(gpipe.step_seconds, rel=1e-3)
    assert early.bubble_fraction == pytest.approx(2 / 9, rel=1e-3)
    assert (gpipe.in_flight, early.in_flight) == ((7, 7, 7), (3, 2, 1))
    assert all(a < b for a, b in zip(early.peak_bytes, gpipe.peak_bytes, strict=True))


def test_policy_b_hides_transfers_that_policy_a_waits_for() -> None:
    """With transfers as long as a forward; it is policy A on twice the stages less one."""
    policy_a, policy_b = figures.warmup_policies().values()
    assert (policy_a.in_flight, policy_b.in_flight) == ((3, 2, 1), (5, 3, 1))
    ideal = 10 * 3 + 2 * (3 + 2)  # units of a forward: M (F + B), fill and drain with transfers
    assert policy_b.step_seconds == pytest.approx(ideal * figures.FORWARD_SECONDS)
    assert policy_a.step_seconds > 1.25 * policy_b.step_seconds


def test_the_figures_are_drawn_and_told(tmp_path) -> None:
    """Each is embedded in the page under its name, and small."""
    pytest.importorskip("matplotlib")
    text = figures.section({})
    for path in figures.draw_all(tmp_path):
        assert f"](images/{path.name})" in text
        assert path.stat().st_size < 100_000
        assert (ROOT / "docs" / "images" / path.name).exists()
