"""What of an AllReduce the last backward does not hide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple.planner.exposed import bucketed_seconds, exposed_alone, exposed_seconds


def prefix(values: list[float]) -> np.ndarray:
    """Prefix sums that begin with 0."""
    return np.concatenate([[0.0], np.cumsum(values)])


def test_the_first_layers_gradients_are_never_hidden():
    """Layers of 1 and 9 bytes, backwards of 5 s each, a byte a second.

    The 9 bytes are ready 5 s before the end and take until 4 s behind it; then the other one.
    """
    assert exposed_alone(prefix([1, 9]), prefix([5, 5]), 0.0, 1.0) == 5
    assert exposed_alone(prefix([9, 1]), prefix([5, 5]), 0.0, 1.0) == 9
    assert exposed_alone(prefix([0, 4]), prefix([5, 5]), 0.0, 1.0) == 0


def test_a_fixed_cost_counts_from_the_first_layer_with_parameters():
    """The layer with bytes is done 5 s before the end, and 6 s are fixed."""
    assert exposed_alone(prefix([0, 1]), prefix([5, 5]), 6.0, 1.0) == 2


layers = st.lists(st.tuples(st.sampled_from([0, 1, 3, 8]), st.floats(0, 5)), min_size=1, max_size=7)


@given(layers, st.floats(0, 2), st.floats(0, 3))
def test_all_pairs_at_once_give_the_same_as_each_alone(
    rows: list[tuple[int, float]], fixed: float, per_byte: float
):
    """The matrix of `exposed_seconds` against `exposed_alone`."""
    size, backward = prefix([n for n, _ in rows]), prefix([b for _, b in rows])
    matrix = exposed_seconds(size, backward, fixed, per_byte)
    for start in range(len(rows)):
        for stop in range(start + 1, len(rows) + 1):
            part = slice(start, stop + 1)
            alone = exposed_alone(size[part], backward[part], fixed, per_byte)
            assert matrix[start, stop] == pytest.approx(alone, abs=1e-9)


@given(layers, st.floats(0, 2), st.floats(0, 3), st.data())
def test_no_way_to_fill_buckets_exposes_less(
    rows: list[tuple[int, float]], fixed: float, per_byte: float, data: st.DataObject
):
    """Buckets that end at any layers with parameters, from the last to the first."""
    size, backward = prefix([n for n, _ in rows]), prefix([b for _, b in rows])
    buckets, filled = [], 0
    owners = [n for n, (own, _) in enumerate(rows) if own]
    for layer in reversed(owners):
        filled += rows[layer][0]
        if layer == owners[0] or data.draw(st.booleans()):
            buckets.append((layer, filled))
            filled = 0
    found = bucketed_seconds(buckets, backward, 0, fixed, per_byte)
    assert exposed_alone(size, backward, fixed, per_byte) <= found + 1e-9
