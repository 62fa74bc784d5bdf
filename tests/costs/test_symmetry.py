"""Replicas that run alike are simulated once."""

from __future__ import annotations

from dapple.cluster import preset
from dapple.costs import CostModel, PipelineCosts, merge_equal_replicas, pipeline_costs
from tests.simulator.pipelines import chain, plan

PROFILE = chain([1, 1], [2, 2], bytes_per_row=8, parameter_bytes=4)


def costs(replicas: list[int], batch: int, name: str = "config-a") -> PipelineCosts:
    """One micro-batch on a preset cluster."""
    made = plan(replicas, batch, 1, preset(name))
    return pipeline_costs(CostModel(PROFILE, made.cluster), made.stages, batch, 1)


def test_two_stages_of_eight_equal_replicas_become_two_units():
    """Their eight flows stay eight on the card that they share."""
    merged = merge_equal_replicas(costs([8, 8], 16))
    assert merged.units_of == ((0,), (1,))
    (channel,) = merged.channels
    assert (channel.route.out_count, channel.route.in_count) == (8, 8)
    assert (channel.back.out_count, channel.back.in_count) == (8, 8)


def test_machines_apart_share_nothing():
    """On one device per machine each flow is alone on its cards."""
    merged = merge_equal_replicas(costs([8, 8], 16, "config-b"))
    assert len(merged.channels) == 1
    assert merged.channels[0].route.out_count == 1


def test_the_ring_between_machines_becomes_one_flow():
    """All links of a ring over equal machines carry the same."""
    merged = merge_equal_replicas(costs([14, 2], 28, "config-b"))
    assert [len(part.ring.between) for part in merged.sums] == [1, 1]


def test_replicas_with_other_rows_or_neighbours_stay_apart():
    """3 rows over 2 replicas: 2 and 1."""
    assert merge_equal_replicas(costs([2, 1], 3)).num_units == 3


def test_only_those_with_equal_neighbours_are_merged():
    """4 to 2 replicas of 6 rows, 2, 2, 1, 1 against 3, 3: only the last two feed one alike."""
    assert merge_equal_replicas(costs([4, 2], 6)).replica_of == (0, 1, 2, 0, 1)
    assert merge_equal_replicas(costs([4, 2], 8)).num_units == 2


def test_a_pipeline_without_replicas_is_left_as_it_is():
    """There is nothing to merge."""
    straight = costs([1, 1], 2)
    assert merge_equal_replicas(straight) is straight
