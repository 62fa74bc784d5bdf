"""Sums over gloo go in pieces of the same tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapple.runtime.transport import pieces


@given(st.integers(1, 50), st.integers(8, 200), st.sampled_from([torch.float32, torch.float64]))
def test_pieces_are_views_that_cover_a_tensor_once(
    size: int, limit: int, dtype: torch.dtype
) -> None:
    """Adding one to each piece adds one to each number; none is larger than the limit."""
    tensor = torch.zeros(size, 2, dtype=dtype)
    found = pieces(tensor, limit)
    for piece in found:
        assert 0 < piece.nbytes <= limit
        piece += 1
    assert tensor.tolist() == [[1.0, 1.0]] * size


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_tensor_that_is_small_enough_stays_whole(limit: int | None) -> None:
    """And where the backend does better with whole tensors, every tensor does."""
    tensor = torch.zeros(10, 2)
    (found,) = pieces(tensor, limit)
    assert found is tensor
