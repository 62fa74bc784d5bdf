"""What layers, messages and AllReduces cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple.cluster import Link, preset
from dapple.costs import (
    NO_CARD,
    CostModel,
    Network,
    Route,
    bytes_at,
    overlaps,
    pipeline_costs,
    recomputed_ranges,
    seconds_at,
    split_rows,
)
from dapple.errors import InputError, PlanError
from dapple.records import StagePlan, TensorProfile, TiedGroup, TiedMember
from tests.simulator.pipelines import chain, cluster, plan


@given(st.integers(0, 100), st.integers(1, 12))
def test_rows_are_split_like_tensor_split(rows: int, parts: int):
    """All rows, sizes that differ by at most one, larger ones first."""
    split = split_rows(rows, parts)
    assert (sum(split), len(split)) == (rows, parts)
    assert list(split) == sorted(split, reverse=True)
    assert split[0] - split[-1] <= 1


@given(st.integers(0, 100), st.lists(st.floats(0.1, 9), min_size=1, max_size=6))
def test_shares_split_all_rows_within_one_row_of_their_proportion(rows: int, shares: list[float]):
    """The cumulative ends are rounded, so no row is lost or given twice."""
    split = split_rows(rows, len(shares), shares)
    assert sum(split) == rows
    for part, share in zip(split, shares, strict=True):
        assert abs(part - rows * share / sum(shares)) <= 1 + 1e-9


@given(st.integers(0, 40), st.integers(1, 7), st.integers(1, 7))
def test_overlaps_carry_every_row_once_over_at_most_r1_plus_r2_minus_1_messages(rows, r1, r2):
    """Compared with the ranges intersected one by one."""
    senders, receivers = split_rows(rows, r1), split_rows(rows, r2)
    expected = []
    for i in range(r1):
        for k in range(r2):
            mine = range(sum(senders[:i]), sum(senders[: i + 1]))
            theirs = range(sum(receivers[:k]), sum(receivers[: k + 1]))
            if common := len(set(mine) & set(theirs)):
                expected.append((i, k, common))
    assert list(overlaps(senders, receivers)) == expected
    assert len(expected) <= r1 + r2 - 1


def test_times_are_interpolated_with_a_floor_below_and_in_proportion_above():
    """Sizes 2, 4, 8 took 1, 3, 4 s."""
    at = [seconds_at((2, 4, 8), (1.0, 3.0, 4.0), rows) for rows in (0, 1, 2, 3, 4, 6, 8, 12)]
    assert at == pytest.approx([0, 1, 1, 2, 3, 3.5, 4, 6])


def test_noise_between_the_last_two_sizes_makes_no_work_free():
    """Two rows took as long as one by noise; a hundred still take a hundred rows' time."""
    assert seconds_at((1, 2), (4.0, 4.0), 100) == 200.0


def test_one_batch_size_scales_in_proportion():
    """Nothing is known but one point, so the line goes through zero."""
    assert seconds_at((4,), (2.0,), 1) == 0.5
    assert bytes_at((4,), (100,), 6) == 150


def test_bytes_shrink_below_the_smallest_size():
    """Bytes are a + b rows, also below; never negative."""
    assert bytes_at((2, 4), (30, 50), 1) == 20
    assert bytes_at((2, 4), (10, 50), 1) == 0


def test_crossing_tensors_count_once_per_consuming_stage_and_inputs_cost_nothing():
    """A tensor read twice in a stage is sent once; model inputs are sliced by every rank."""
    tensors = [
        TensorProfile(name="in", producer=-1, consumers=(2,), bytes_per_sample=1000),
        TensorProfile(name="x", producer=0, consumers=(1, 2, 3), bytes_per_sample=10),
        TensorProfile(name="m", producer=1, consumers=(2,), fixed_bytes=7, needs_grad=False),
    ]
    model = CostModel(chain([1] * 4, [1] * 4, tensors=tensors), cluster(2))
    crossing = model.crossing((0, 2), (2, 4))
    assert crossing is not None
    assert (crossing.forward_bytes(3), crossing.backward_bytes(3)) == (37, 30)
    assert model.crossing((2, 3), (3, 4)) is None


def test_a_tied_parameter_counts_once_in_a_stage_and_leaves_the_sum_of_its_stages():
    """Together in one stage: part of its own AllReduce. Apart: one AllReduce over the union."""
    group = TiedGroup(
        parameter_bytes=6,
        members=(TiedMember(layer=0, parameter="w"), TiedMember(layer=1, parameter="w")),
    )
    profile = chain([1, 1], [1, 1], parameter_bytes=10, tied=[group])
    where = cluster(1, 4)
    model = CostModel(profile, where)
    assert model.parameter_bytes(0, 2) == 14
    together = pipeline_costs(model, plan([2], 2, 1, where, cuts=[2]).stages, 2, 1)
    assert [(part.stages, part.size) for part in together.sums] == [((0,), 14)]
    apart = pipeline_costs(model, plan([2, 2], 2, 1, where).stages, 2, 1)
    assert [(p.stages, p.size) for p in apart.sums] == [((0,), 4), ((1,), 4), ((0, 1), 6)]


def test_stages_and_micro_batches_with_uneven_rows_get_their_own_times():
    """Seven rows in two micro-batches (4, 3) over two replicas: 2+2 and 2+1."""
    where = cluster(1, 2)
    model = CostModel(chain([1], [2]), where)
    costs = pipeline_costs(model, plan([2], 7, 2, where).stages, 7, 2)
    assert (costs.sizes, costs.first_small) == ((4, 3), 1)
    assert costs.rows == ((2, 2), (2, 1))
    assert costs.forward == ((2, 2), (2, 1))
    assert costs.backward == ((4, 4), (4, 2))


def test_proportional_shares_give_a_faster_replica_more_rows():
    """Shares 3 : 1 of eight rows."""
    where = cluster(1, 2)
    stage = StagePlan(start=0, stop=1, devices=(0, 1), rows=(3.0, 1.0))
    costs = pipeline_costs(CostModel(chain([1], [2]), where), [stage], 8, 1)
    assert costs.rows == ((6,), (2,))


def test_recomputed_ranges_add_their_forward_to_the_backward():
    """Layers of 1, 2 and 4 s forward; the second is recomputed."""
    stage = StagePlan(start=0, stop=3, devices=(0,), recompute=((1, 2),))
    costs = pipeline_costs(CostModel(chain([1, 2, 4], [3, 4, 5]), cluster(1)), [stage], 1, 1)
    assert (costs.backward, costs.recompute) == (((14,),), ((2,),))


def test_the_models_last_layer_is_never_recomputed():
    """The loss keeps what it needs of it, whatever the plan says."""
    stage = StagePlan(start=0, stop=3, devices=(0,), recompute=True)
    assert recomputed_ranges(stage, 3) == ((0, 2),)
    assert recomputed_ranges(stage, 4) == ((0, 3),)
    assert recomputed_ranges(stage.model_copy(update={"recompute": ((1, 2), (2, 3))}), 3) == (
        (1, 2),
    )


@pytest.mark.parametrize("ranges", [((0, 3),), ((1, 1),), ((1, 2), (0, 1)), ((-1, 1),)])
def test_recompute_outside_of_its_stage_is_refused(ranges):
    """Beyond the stage, empty, out of order."""
    stage = StagePlan(start=0, stop=2, devices=(0,), recompute=ranges)
    with pytest.raises(PlanError, match="recompute names layers"):
        pipeline_costs(CostModel(chain([1, 2], [3, 4]), cluster(1)), [stage], 1, 1)


@pytest.mark.parametrize("shares", [(0.0, 0.0), (2.0, -1.0)])
def test_shares_that_divide_nothing_are_refused(shares):
    """With the even split as the remedy."""
    with pytest.raises(PlanError, match="even split"):
        split_rows(4, 2, shares)


def test_routes_of_the_paper_have_no_latency_and_no_card():
    """25 Gbit/s: 0.8 GB/s for each flow between machines, 40 GB/s inside."""
    network = Network(preset("config-a"), "paper")
    assert network.route(0, 8) == Route(0.0, 0.8e9, NO_CARD, NO_CARD)
    assert network.route(0, 1) == Route(0.0, 40e9, NO_CARD, NO_CARD)


def test_routes_of_the_shared_model_name_their_cards():
    """Out of machine 1 and into machine 0; inside a machine there is none."""
    network = Network(preset("config-a"), "shared")
    assert network.route(8, 0) == Route(30e-6, 0.8e9, 2, 1)
    assert network.route(8, 9) == Route(5e-6, 40e9, NO_CARD, NO_CARD)


def test_an_allreduce_of_one_device_or_no_bytes_takes_no_time():
    """Nothing to sum."""
    for model in ("paper", "shared"):
        network = Network(preset("config-a"), model)
        assert network.ring((3,)).seconds(10**9) == 0
        assert network.ring((0, 8)).seconds(0) == 0


def test_the_papers_allreduce_uses_130_gb_inside_and_3_gb_between():
    """2 (n-1)/n x bytes / bandwidth."""
    network = Network(preset("config-a"), "paper")
    assert network.ring(range(8)).seconds(1e9) == pytest.approx(2 * 7 / 8 / 130)
    assert network.ring(range(16)).seconds(1e9) == pytest.approx(2 * 15 / 16 / 3)


def test_an_unknown_network_model_is_refused_with_the_known_ones():
    """InputError, with values and remedy."""
    with pytest.raises(InputError, match='"free" is unknown; known: shared, paper'):
        Network(preset("config-a"), "free")


def test_cards_that_cannot_fill_are_not_contended():
    """Two flows of 0.4 fit on a card of 1; two of 0.6 do not."""
    for rate, expected in ((0.4, set()), (0.6, {0, 1, 2, 3})):
        where = cluster(2, 2, bandwidth=1.0, flow_bandwidth=rate, inside=Link(bandwidth=1))
        model = CostModel(chain([1, 1], [1, 1], bytes_per_row=1), where)
        costs = pipeline_costs(model, plan([2, 2], 2, 1, where).stages, 2, 1)
        assert set(costs.contended) == expected
