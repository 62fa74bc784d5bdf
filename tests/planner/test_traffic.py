"""Transfers of whole micro-batches: the fast way and the plain way give the same seconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple.cluster import Cluster
from dapple.costs import Network, split_rows
from dapple.planner.exact import device_sequences
from dapple.planner.symmetry import Symmetry
from dapple.planner.traffic import (
    CutBytes,
    MessageBytes,
    busiest,
    link_loads,
    traffic,
    transfer_seconds,
)
from tests.planner.strategies import clusters


@given(clusters(max_devices=6), st.integers(1, 12), st.booleans(), st.data())
def test_slowest_flow_or_card(
    cluster: Cluster, rows: int, paper: bool, data: st.DataObject
) -> None:
    """Alike flows are looked at once, and none is forgotten, be they few or many, there and back."""
    network = Network(cluster, "paper" if paper else "shared")
    if cluster.num_devices < 2:
        return
    pairs = list(device_sequences(cluster.machine_sizes(), 2))
    senders, receivers = data.draw(st.sampled_from(pairs))
    size = MessageBytes(np.array([0.0, 10.0, 1e6]), np.array([0.0, 0.0, 500.0]))
    parts = split_rows(rows, len(senders)), split_rows(rows, len(receivers))
    half = MessageBytes(size.per_row / 2, size.fixed / 2)
    expected = [
        busiest(loads, 1, loads, 0, bytes_)
        for bytes_, loads in (
            (size, traffic(network, senders, receivers, parts)),
            (half, traffic(network, receivers, senders, parts[::-1])),
        )
    ]
    places = Symmetry(cluster, network).places
    for few in (0, 24):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dapple.planner.traffic._FEW", few)
            loads = link_loads(network, places, (senders, receivers), parts)
            found = transfer_seconds(loads, CutBytes(size, half))
        assert np.allclose(found, expected, rtol=1e-12)
