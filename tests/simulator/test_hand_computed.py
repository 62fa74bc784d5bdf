"""Steps small enough to compute by hand."""

from __future__ import annotations

import pytest

from dapple.cluster import Link
from dapple.costs import CostModel
from dapple.errors import PlanError, ScheduleError
from dapple.records import StagePlan, TensorProfile, TiedGroup, TiedMember
from dapple.simulator import predict, simulate, step_seconds
from tests.simulator.pipelines import chain, cluster, plan

FREE = {"bandwidth": 1e30}


def test_four_equal_stages_take_33_units_and_hold_4_3_2_1_micro_batches():
    """(M + S - 1) (F + B) = 11 x 3: the fill and drain of the textbook picture."""
    timeline = simulate(plan([1] * 4, 8, 8, cluster(4, **FREE)), chain([1] * 4, [2] * 4))
    assert timeline.step_seconds == pytest.approx(33)
    assert timeline.in_flight == (4, 3, 2, 1)
    assert timeline.bubble_fraction == pytest.approx(3 / 11)


def test_gpipe_takes_as_long_but_holds_all_micro_batches():
    """GPipe's bubble equals early backward's; its memory does not."""
    made = plan([1] * 4, 8, 8, cluster(4, **FREE))
    timeline = simulate(made, chain([1] * 4, [2] * 4), schedule="gpipe")
    assert timeline.step_seconds == pytest.approx(33)
    assert timeline.in_flight == (8, 8, 8, 8)


@pytest.mark.parametrize("schedule", ["early-backward", "gpipe"])
def test_fewer_micro_batches_than_stages_still_pass_through_all_of_them(schedule):
    """Two micro-batches in four stages: (2 + 3) x 3, and no stage holds more than two."""
    timeline = simulate(
        plan([1] * 4, 2, 2, cluster(4, **FREE), schedule=schedule), chain([1] * 4, [2] * 4)
    )
    assert timeline.step_seconds == pytest.approx(15)
    assert max(timeline.in_flight) == 2


def test_a_profile_without_tensors_is_a_chain_with_free_transfers():
    """Layers written by hand, without tensors and on a real network, still wait for each other."""
    made = plan([1] * 4, 8, 8, cluster(4, bandwidth=1.0, latency=1.0))
    assert simulate(made, chain([1] * 4, [2] * 4, tensors=[])).step_seconds == pytest.approx(33)


def test_transfers_overlap_with_computing_but_add_to_fill_and_drain():
    """F = B = 2, transfers of 1 each way, M = 3: 2+1+2 | 2+2+2+2+2 | 1+2 with enough warm-up."""
    made = plan([1, 1], 3, 3, cluster(2, bandwidth=1.0), warmup=[3, 1])
    profile = chain([2, 2], [2, 2], bytes_per_row=1)
    assert simulate(made, profile).step_seconds == pytest.approx(2 + 1 + 3 * 4 + 1 + 2)


def test_policy_a_waits_for_transfers_where_policy_b_does_not():
    """With K = (2, 1) stage 1 idles for the round trip of a transfer; with (3, 1) it does not."""
    where, profile = cluster(2, bandwidth=1.0), chain([2, 2], [2, 2], bytes_per_row=1)
    short = simulate(plan([1, 1], 6, 6, where, warmup=[2, 1]), profile).step_seconds
    enough = simulate(plan([1, 1], 6, 6, where, warmup=[3, 1]), profile).step_seconds
    assert enough == pytest.approx(2 + 1 + 6 * 4 + 1 + 2)
    assert short > enough


def test_latency_counts_once_for_each_message():
    """One micro-batch: 1 + (3 + 5) + 1 + 1 + (3 + 5) + 1."""
    made = plan([1, 1], 1, 1, cluster(2, bandwidth=1.0, latency=3.0))
    assert simulate(made, chain([1, 1], [1, 1], bytes_per_row=5)).step_seconds == pytest.approx(20)


def test_three_replicas_feed_two_over_the_overlapping_rows_only():
    """Six rows: ranges 2+2+2 meet 3+3, so the middle replica sends one row to each."""
    made = plan([3, 2], 6, 1, cluster(5, bandwidth=1e30, flow_bandwidth=1.0))
    timeline = simulate(made, chain([1, 1], [1, 1], bytes_per_row=1))
    sends = [s for s in timeline.spans if s.kind == "send"]
    there = sorted((s.replica, round(s.end - s.start)) for s in sends if s.stage == 0)
    back = sorted((s.replica, round(s.end - s.start)) for s in sends if s.stage == 1)
    assert there == [(0, 2), (1, 1), (1, 1), (2, 2)]
    assert back == [(0, 1), (0, 2), (1, 1), (1, 2)]
    forward = [round(s.end - s.start) for s in timeline.spans if s.kind == "forward"]
    assert forward == [2, 2, 2, 3, 3]


def test_a_replica_without_rows_computes_and_sends_nothing_but_joins_the_sum():
    """Two rows over three replicas: the third shows in the AllReduce alone."""
    made = plan([3, 1], 2, 1, cluster(4, bandwidth=1e9))
    timeline = simulate(made, chain([1, 1], [1, 1], parameter_bytes=4, bytes_per_row=1))
    assert [span.kind for span in timeline.spans if span.rank == 2] == ["allreduce"]


def test_a_batch_smaller_than_the_micro_batches_leaves_the_last_ones_empty():
    """Three rows in five micro-batches: as long as three micro-batches of one row."""
    where, profile = cluster(2, **FREE), chain([1, 1], [2, 2])
    step = simulate(plan([1, 1], 3, 5, where), profile).step_seconds
    assert step == pytest.approx(simulate(plan([1, 1], 3, 3, where), profile).step_seconds)


def test_last_micro_batches_are_smaller_when_m_does_not_divide_the_batch():
    """Five rows in two micro-batches of 3 and 2 on one device: 3 + 6 + 2 + 4."""
    timeline = simulate(plan([1], 5, 2, cluster(1)), chain([1], [2]))
    assert timeline.step_seconds == pytest.approx(15)
    assert [round(s.end - s.start) for s in timeline.spans] == [3, 6, 2, 4]


def test_two_flows_out_of_one_machine_take_twice_as_long():
    """Devices 0, 1 on one machine feed 2, 3 on another: two flows of 4 bytes on a card of 1 B/s."""
    made = plan([2, 2], 2, 1, cluster(2, 2, bandwidth=1.0))
    profile = chain([1, 1], [1, 1], bytes_per_row=4)
    assert simulate(made, profile).step_seconds == pytest.approx(1 + 8 + 1 + 1 + 8 + 1)
    paper = simulate(made, profile, network_model="paper")
    assert paper.step_seconds == pytest.approx(1 + 4 + 1 + 1 + 4 + 1)


def test_flows_below_their_own_limit_do_not_slow_each_other_down():
    """Two flows of at most 0.5 B/s fit on a card of 1 B/s."""
    where = cluster(2, 2, bandwidth=1.0, flow_bandwidth=0.5)
    timeline = simulate(plan([2, 2], 2, 1, where), chain([1, 1], [1, 1], bytes_per_row=4))
    assert timeline.step_seconds == pytest.approx(1 + 8 + 1 + 1 + 8 + 1)


def test_a_flow_speeds_up_when_the_other_one_has_ended():
    """3 and 2 rows: both at 1/2 until the short one ends at 4, the rest alone until 5.

    Back, 2 rows start at 4 and 3 rows at 5: 1 byte alone, 1 at 1/2 until 7, the last 2 alone.
    """
    made = plan([2, 2], 5, 1, cluster(2, 2, bandwidth=1.0))
    timeline = simulate(made, chain([0, 0], [0, 0], bytes_per_row=1))
    ends = sorted(s.end for s in timeline.spans if s.kind == "send")
    assert ends == pytest.approx([4, 5, 7, 9])


def test_opposite_directions_of_a_card_do_not_share():
    """Activations of micro-batch 1 and gradients of 0 pass each other at full rate."""
    made = plan([1, 1], 2, 2, cluster(2, bandwidth=1.0), warmup=[2, 1])
    timeline = simulate(made, chain([1, 1], [1, 1], bytes_per_row=4))
    assert {round(s.end - s.start, 6) for s in timeline.spans if s.kind == "send"} == {4.0}


def test_allreduce_inside_a_machine_is_a_ring_over_its_devices():
    """Four devices, 8 bytes at 1 B/s, latency 0.1: 2 x 3 x 0.1 + 2 x 3/4 x 8 after 1 + 1."""
    where = cluster(1, 4, inside=Link(bandwidth=1.0, latency=0.1))
    timeline = simulate(plan([4], 4, 1, where), chain([1], [1], parameter_bytes=8))
    assert timeline.step_seconds == pytest.approx(2 + 0.6 + 12)


def test_allreduce_over_machines_is_a_ring_inside_and_one_between():
    """Two machines of two: 2 x 1/2 x 8 inside at 4 B/s, then 2 x 1/2 x 8 between at 1 B/s."""
    where = cluster(2, 2, bandwidth=1.0, inside=Link(bandwidth=4.0))
    timeline = simulate(plan([4], 4, 1, where), chain([1], [1], parameter_bytes=8))
    assert timeline.step_seconds == pytest.approx(2 + 2 + 8)


def test_allreduce_of_the_paper_takes_the_slowest_link_of_one_ring():
    """Two machines of two: 2 x 3/4 x 8 bytes at 3 B/s."""
    where = cluster(2, 2, bandwidth=1.0, allreduce_bandwidth=3.0, inside=Link(bandwidth=4.0))
    made = plan([4], 4, 1, where, network_model="paper")
    timeline = simulate(made, chain([1], [1], parameter_bytes=8))
    assert timeline.step_seconds == pytest.approx(2 + 12 / 3)


def test_allreduce_of_a_later_stage_overlaps_the_earlier_stages_drain():
    """Stage 1 sums its gradients while stage 0 still computes its last backward."""
    where = cluster(3, 1, bandwidth=1e9)
    timeline = simulate(plan([1, 2], 2, 1, where), chain([1, 1], [1, 4], parameter_bytes=10**9))
    kinds = {(s.stage, s.kind): s for s in timeline.spans if s.kind in ("allreduce", "backward")}
    assert kinds[1, "allreduce"].start < kinds[0, "backward"].end


def test_two_allreduces_on_one_card_share_it():
    """Both replicas of both stages sit on the same two machines and finish together."""
    where = cluster(2, 2, bandwidth=1.0, inside=Link(bandwidth=1e30))
    stages = (
        StagePlan(start=0, stop=1, devices=(0, 2), warmup=1),
        StagePlan(start=1, stop=2, devices=(1, 3), warmup=1),
    )
    made = plan([2, 2], 2, 1, where).model_copy(update={"stages": stages})
    timeline = simulate(made, chain([1, 1], [0, 0], parameter_bytes=8))
    assert timeline.step_seconds == pytest.approx(2 + 16)


def test_a_tied_parameter_is_summed_once_over_all_stages_that_hold_it():
    """First and last layer share 6 of their bytes; nothing else is replicated."""
    members = (TiedMember(layer=0, parameter="w"), TiedMember(layer=2, parameter="w"))
    profile = chain(
        [1, 1, 1],
        [1, 1, 1],
        parameter_bytes=6,
        tied=[TiedGroup(parameter_bytes=6, members=members)],
    )
    timeline = simulate(plan([1, 1, 1], 1, 1, cluster(3, bandwidth=1.0)), profile)
    sums = [(s.stage, s.start, s.end) for s in timeline.spans if s.kind == "allreduce"]
    assert sums == [(0, 6.0, 12.0), (2, 6.0, 12.0)]


def test_the_optimizer_waits_for_the_allreduce():
    """1 + 1, the AllReduce of 8 x 1/1, then the update of 3."""
    where = cluster(2, bandwidth=1.0)
    profile = chain([1], [1], parameter_bytes=8, optimizer_seconds=3.0)
    timeline = simulate(plan([2], 2, 1, where), profile)
    assert timeline.step_seconds == pytest.approx(2 + 8 + 3)
    assert timeline.spans[-1].kind == "optimizer"


def test_a_tensor_that_skips_a_stage_goes_straight_to_its_consumer():
    """The skip's 10 bytes keep stage 2 waiting; stage 1 neither carries nor waits for them."""
    tensors = [
        TensorProfile(name="a", producer=0, consumers=(1,), bytes_per_sample=0),
        TensorProfile(name="b", producer=1, consumers=(2,), bytes_per_sample=0),
        TensorProfile(name="skip", producer=0, consumers=(2,), bytes_per_sample=10),
    ]
    timeline = simulate(
        plan([1] * 3, 1, 1, cluster(3, bandwidth=1.0)), chain([1] * 3, [1] * 3, tensors=tensors)
    )
    starts = {s.stage: s.start for s in timeline.spans if s.kind == "forward"}
    assert starts == {0: 0, 1: 1, 2: 11}


def test_values_without_gradient_send_nothing_back():
    """A mask of 10 bytes costs its way forward and no way back."""
    tensors = [
        TensorProfile(name="x", producer=0, consumers=(1,), bytes_per_sample=1),
        TensorProfile(name="mask", producer=0, consumers=(1,), fixed_bytes=10, needs_grad=False),
    ]
    made = plan([1, 1], 1, 1, cluster(2, bandwidth=1.0))
    assert simulate(made, chain([1, 1], [1, 1], tensors=tensors)).step_seconds == pytest.approx(
        1 + 11 + 1 + 1 + 1 + 1
    )


def test_recompute_runs_the_forward_again_before_each_backward():
    """Two micro-batches on one device, of two layers all but the last: 2 x (3 + 1 + 6)."""
    made = plan([1], 2, 2, cluster(1), cuts=[2])
    stages = (made.stages[0].model_copy(update={"recompute": True}),)
    timeline = simulate(made.model_copy(update={"stages": stages}), chain([1, 2], [2, 4]))
    assert timeline.step_seconds == pytest.approx(20)
    assert [s.kind for s in timeline.spans] == ["forward", "recompute", "backward"] * 2


def test_a_sharded_update_is_divided_and_spread():
    """Two replicas update half of 4 s each, then send half of 8 bytes at 1 byte/s to the other."""
    made = plan([2], 2, 1, cluster(2, bandwidth=1.0))
    stages = (made.stages[0].model_copy(update={"shard": "optimizer"}),)
    profile = chain([1], [2], parameter_bytes=8, optimizer_seconds=4)
    whole, shared = (
        simulate(made.model_copy(update={"stages": s}), profile) for s in (made.stages, stages)
    )
    assert whole.step_seconds == pytest.approx(1 + 2 + 8 + 4)
    assert shared.step_seconds == pytest.approx(1 + 2 + 8 + 2 + 4)


def test_a_faster_device_divides_all_its_times():
    """Speed 2 halves forward, backward and update."""
    made = plan([1], 2, 2, cluster(1, speed=2.0))
    assert simulate(made, chain([1], [2], optimizer_seconds=4)).step_seconds == pytest.approx(5)


def test_receives_are_posted_one_micro_batch_beyond_those_in_flight():
    """K = 1: a fast stage 0 may send two micro-batches ahead; the third waits for a backward."""
    made = plan([1, 1], 4, 4, cluster(2, bandwidth=1e9), warmup=[4, 1])
    timeline = simulate(made, chain([1, 10], [1, 10], bytes_per_row=1))
    sends = [s for s in timeline.spans if s.kind == "send" and s.stage == 0]
    ready = [s.end for s in timeline.spans if s.kind == "backward" and s.stage == 1]
    assert [s.start for s in sends] == pytest.approx([1, 2, ready[0], ready[1]], abs=1e-6)


def test_warm_up_that_increases_along_the_pipeline_is_refused_as_a_deadlock():
    """K = (1, 2) would wait for ever, in the fast path as well."""
    made, profile = plan([1, 1], 4, 4, cluster(2, **FREE), warmup=[1, 2]), chain([1, 1], [2, 2])
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(made, profile)
    with pytest.raises(ScheduleError, match="stage 0 waits at 0B0"):
        step_seconds(CostModel(profile, made.cluster), made.stages, 4, 4)


def test_plans_that_do_not_fit_profile_or_cluster_are_refused():
    """Another number of layers, too few devices."""
    made = plan([1, 1], 4, 4, cluster(2))
    with pytest.raises(PlanError, match="covers 2 layers but the profile has 3"):
        simulate(made, chain([1] * 3, [1] * 3))
    with pytest.raises(PlanError, match="uses device 1 but the cluster has 1"):
        simulate(made, chain([1, 1], [1, 1]), cluster=cluster(1))


def test_predicted_figures_agree_with_the_timeline():
    """Same step, same bubble; stage figures of the largest micro-batch and slowest replica."""
    made = plan([2, 1], 7, 3, cluster(3, bandwidth=1.0))
    profile = chain([1, 1], [2, 2], bytes_per_row=1, parameter_bytes=4)
    predicted, timeline = predict(made, profile), simulate(made, profile)
    assert predicted.step_seconds == timeline.step_seconds
    assert predicted.samples_per_second == pytest.approx(7 / timeline.step_seconds)
    assert predicted.bubble_fraction == pytest.approx(timeline.bubble_fraction)
    first, last = predicted.stages
    assert (first.forward_seconds, first.backward_seconds) == (2, 4)
    assert (first.send_seconds, first.allreduce_seconds) == (2, 4)
    assert (last.forward_seconds, last.send_seconds, last.allreduce_seconds) == (3, 0, 0)


def test_spans_can_be_left_out():
    """Without spans the times are the same."""
    made, profile = plan([1, 1], 4, 4, cluster(2)), chain([1, 1], [1, 1], bytes_per_row=1)
    bare = simulate(made, profile, spans=False)
    assert not bare.spans
    assert bare.step_seconds == simulate(made, profile).step_seconds


def test_buckets_are_summed_while_the_last_backward_goes_on():
    """Three layers of 32 MiB, two replicas, 16 MiB/s: a bucket each, 2 s each.

    F 3 x 1 s, then B of 4, 1 and 1 s, the last layer first: complete at 7, 8 and 9. The first bucket
    is summed from 7 to 9, the second from 9 to 11, the third to 13. After the backward: 9 + 6.
    """
    profile = chain([1, 1, 1], [1, 1, 4], parameter_bytes=32 * 2**20)
    made = plan([2], 2, 1, cluster(2, bandwidth=16 * 2**20), cuts=[3], warmup=[1])
    timeline = simulate(made, profile)
    sums = [(s.start, s.end) for s in timeline.spans if s.kind == "allreduce" and s.rank == 0]
    assert sums == [(7, 9), (9, 11), (11, 13)]
    assert timeline.step_seconds == 13
    model = CostModel(profile, made.cluster, overlap=False)
    assert step_seconds(model, made.stages, 2, 1) == 15


def test_a_bucket_waits_for_the_replica_that_is_behind():
    """Three rows on two replicas: the one with two rows begins its backward at 4 and ends at 12.

    Its last layer's gradients are there at 10, the other's earlier; 32 MiB take 2 s.
    """
    profile = chain([1, 1], [1, 3], parameter_bytes=32 * 2**20)
    made = plan([2], 3, 1, cluster(2, bandwidth=16 * 2**20), cuts=[2], warmup=[1])
    sums = [(s.start, s.end) for s in simulate(made, profile).spans if s.kind == "allreduce"]
    assert sorted(set(sums)) == [(10, 12), (12, 14)]
