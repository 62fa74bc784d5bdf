"""A search leaves the garbage collector as it was."""

from __future__ import annotations

import gc

import pytest

from dapple.planner.collecting import seldom_collecting


def test_thresholds_return_after_an_error() -> None:
    """While a search runs the collector runs seldom, and as before when it has failed."""
    before = gc.get_threshold()
    during: list[int] = []

    @seldom_collecting()
    def search() -> None:
        during.append(gc.get_threshold()[0])
        raise ValueError("nothing fits")

    with pytest.raises(ValueError, match="nothing fits"):
        search()
    assert during[0] > before[0]
    assert gc.get_threshold() == before


def test_a_process_without_collection_stays_so() -> None:
    """Who collects no garbage, or even less, is left alone."""
    before = gc.get_threshold()
    try:
        for first in (0, 10**6):
            gc.set_threshold(first, *before[1:])
            with seldom_collecting():
                assert gc.get_threshold()[0] == first
    finally:
        gc.set_threshold(*before)
