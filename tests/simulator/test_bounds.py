"""Two lower bounds that hold for every plan of a chain, whatever the schedule."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dapple.costs import CostModel, PipelineCosts, pipeline_costs
from dapple.simulator import step_seconds
from tests.simulator.pipelines import chain, cluster, plan, seconds


def per_stage_bound(costs: PipelineCosts) -> float:
    """max_s [ fill before s + all work of s + max(drain before s, AR_s) ]."""
    fill, drain = _fill_and_drain(costs)
    sums = _sum_seconds(costs)
    return max(
        sum(fill[: 2 * s])
        + sum(_work(costs, s))
        + max(sum(drain[: 2 * s]), sums[s])
        + costs.optimizer[0]
        for s in range(costs.num_stages)
    )


def one_micro_batch_bound(costs: PipelineCosts) -> float:
    """max_s [ all forwards once + the backwards down to s + AR_s ]."""
    fill, drain = _fill_and_drain(costs)
    sums = _sum_seconds(costs)
    return max(
        sum(fill) + sum(drain[2 * s :]) + sums[s] + costs.optimizer[0]
        for s in range(costs.num_stages)
    )


def _work(costs: PipelineCosts, s: int) -> list[float]:
    unit = costs.units_of[s][0]
    sizes = [costs.size_of(m) for m in range(costs.num_micro_batches)]
    return [costs.forward[unit][n] + costs.backward[unit][n] for n in sizes]


def _fill_and_drain(costs: PipelineCosts) -> tuple[list[float], list[float]]:
    """Stages and the transfers between them, in turn; first replicas, smallest micro-batch."""
    fill, drain = [], []
    for s in range(costs.num_stages):
        unit = costs.units_of[s][0]
        fill.append(costs.forward[unit][-1])
        drain.append(costs.backward[unit][-1])
        for channel in costs.channels:
            if channel.source == unit:
                fill.append(channel.route.seconds(channel.forward_bytes[-1] or 0))
                drain.append(channel.back.seconds(channel.backward_bytes[-1] or 0))
    return fill, drain


def _sum_seconds(costs: PipelineCosts) -> list[float]:
    found = dict.fromkeys(range(costs.num_stages), 0.0)
    for part in costs.sums:
        found[part.stages[0]] = part.ring.seconds(part.size)
    return [found[s] for s in range(costs.num_stages)]


@settings(max_examples=300)
@given(st.data())
def test_no_simulated_step_is_shorter_than_the_bounds(data: st.DataObject):
    """With equal replicas everywhere, so that a stage's replicas all take the same time."""
    count, micro_batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    replicas = data.draw(st.integers(1, 3))
    warmup = sorted((data.draw(st.integers(1, 9)) for _ in range(count)), reverse=True)
    profile = chain(
        [data.draw(seconds) for _ in range(count)],
        [data.draw(seconds) for _ in range(count)],
        bytes_per_row=data.draw(st.just(0.0) | st.floats(1e-3, 5)),
        parameter_bytes=data.draw(st.integers(0, 20)),
        optimizer_seconds=data.draw(st.sampled_from([0.0, 1.0])),
    )
    where = cluster(count, replicas, bandwidth=data.draw(st.floats(0.5, 3)), latency=0.1)
    batch = replicas * micro_batches * data.draw(st.integers(1, 2))
    schedule = data.draw(st.sampled_from(["early-backward", "gpipe"]))
    made = plan([replicas] * count, batch, micro_batches, where, warmup=warmup)
    model = CostModel(profile, where)
    costs = pipeline_costs(model, made.stages, batch, micro_batches)
    step = step_seconds(model, made.stages, batch, micro_batches, schedule)
    assert per_stage_bound(costs) <= step * (1 + 1e-9)
    assert one_micro_batch_bound(costs) <= step * (1 + 1e-9)
