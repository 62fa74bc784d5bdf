"""Placement policies against the paper's worked example, and their invariants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dapple.planner.placement import POLICIES, place, placements

TAKEN = (0, 1, 2, 8, 9, 10, 11, 12)


def test_worked_example() -> None:
    """Three machines of eight, 0-2 and 8-12 taken, six wanted (DAPPLE, section 4)."""
    assert place("fresh", (8, 8, 8), TAKEN, 6) == (16, 17, 18, 19, 20, 21)
    assert place("append", (8, 8, 8), TAKEN, 6) == (3, 4, 5, 6, 7, 13)
    assert place("scatter", (8, 8, 8), TAKEN, 6) == (3, 4, 5, 13, 14, 15)


def test_policies_mix_when_their_machines_do_not_suffice() -> None:
    """A policy takes what it prefers first and the rest elsewhere."""
    assert place("fresh", (2, 2, 2), (0,), 5) == (1, 2, 3, 4, 5)
    assert place("append", (2, 2, 2), (4,), 3) == (0, 1, 5)
    assert place("scatter", (2, 2, 2), (0, 2), 4) == (1, 3, 4, 5)


def test_scatter_starts_on_all_machines() -> None:
    """With every machine fresh, scatter takes from all of them."""
    assert place("scatter", (8, 8), (), 4) == (0, 1, 8, 9)


def test_consecutive_differs_from_append() -> None:
    """Consecutive takes the lowest free numbers even on an unused machine."""
    assert place("consecutive", (2, 2), (2,), 2) == (0, 1)
    assert place("append", (2, 2), (2,), 2) == (0, 3)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sets(st.integers(0, 15)),
    st.integers(1, 17),
)
def test_placements_are_free_distinct_devices(
    sizes: list[int], taken: set[int], count: int
) -> None:
    """Every policy gives exactly the wanted number of free devices, or none where too few are."""
    free = [d for d in range(sum(sizes)) if d not in taken]
    for policy in POLICIES:
        devices = place(policy, sizes, taken, count)
        if count > len(free):
            assert devices is None
        else:
            assert devices is not None
            assert len(set(devices)) == count
            assert set(devices) <= set(free)
            assert list(devices) == sorted(devices)
    sets = placements(sizes, taken, count)
    assert len(sets) == len(set(sets))
