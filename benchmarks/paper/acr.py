"""The activation communication ratio of the paper's plans, on our profiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from statistics import mean

from benchmarks.paper.facts import ACRS, BATCHES, CLUSTERS, PLANS, PROFILE_ROWS
from benchmarks.paper.markdown import bullets, join, paragraph, table
from benchmarks.paper.questions import Answers, Case, Question
from dapple.cluster import Cluster
from dapple.costs import CostModel
from dapple.planner.balance import balanced_bounds
from dapple.records import StagePlan


def acr(case: Case) -> float:
    """Of the paper's plan for a case, with its profile's rows on every device."""
    plan = PLANS[case.model][CLUSTERS.index(case.cluster)]
    names = [layer.name for layer in case.profile.layers]
    model = CostModel(case.profile, case.devices, "paper")
    rows = PROFILE_ROWS[case.model]
    if plan.shape == "straight":
        forward, backward = model.layer_seconds(rows)
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        replicas: tuple[int, ...] = (1,) * case.devices.num_devices
        bounds = balanced_bounds(both, len(replicas))
    else:
        replicas = plan.replicas
        bounds = (0, names.index(plan.behind[0]) + 1, len(names))
    stages = in_order(case.devices, bounds, replicas)
    seconds, size = stage_and_message(model, stages, rows * max(replicas))
    return size / flow_rate(case.devices) / mean(seconds)


def in_order(
    cluster: Cluster, bounds: Sequence[int], replicas: Sequence[int]
) -> tuple[StagePlan, ...]:
    """Stages on consecutive devices."""
    starts = itertools.accumulate(replicas, initial=0)
    assert sum(replicas) <= cluster.num_devices
    return tuple(
        StagePlan(start=a, stop=b, devices=tuple(range(first, first + count)))
        for (a, b), first, count in zip(itertools.pairwise(bounds), starts, replicas, strict=False)
    )


def stage_and_message(
    model: CostModel, stages: Sequence[StagePlan], rows: int
) -> tuple[list[float], float]:
    """Of one micro-batch: seconds of every stage, and a message's bytes both ways, on average.

    A message is what one replica hands to one of the next stage, whose rows the larger number of
    replicas decides.
    """
    seconds = [
        sum(model.stage_seconds(stage.start, stage.stop, rows / stage.replicas)) for stage in stages
    ]
    sizes = []
    for one, other in itertools.pairwise(stages):
        crossing = model.crossing((one.start, one.stop), (other.start, other.stop))
        assert crossing is not None
        share = -(-rows // max(one.replicas, other.replicas))
        sizes.append(crossing.forward_bytes(share) + crossing.backward_bytes(share))
    return seconds, mean(sizes)


def flow_rate(cluster: Cluster) -> float:
    """Bytes per second of a flow between machines."""
    (group,) = cluster.machines
    assert group.outside is not None
    return group.outside.flow_bandwidth or group.outside.bandwidth


def questions() -> Iterator[Question[object]]:
    """None: a formula."""
    yield from ()


def section(answers: Answers) -> str:
    """The ratios side by side."""
    del answers
    rows = []
    for (model, cluster), theirs in ACRS.items():
        plan = PLANS[model][CLUSTERS.index(cluster)]
        shape = plan.shape if plan.shape == "straight" else f"{plan.shape}, {plan.split}"
        ours = acr(Case(model, cluster, BATCHES[model], "paper"))
        row = [model, cluster[-1].upper(), shape, f"{theirs:.2f}", f"{ours:.2f}"]
        rows.append([*row, f"{ours / theirs:.2f}"])
    return join(
        "### ACR of the paper's plans",
        paragraph(
            """*Formula*: transfer of one micro-batch's activations and gradients between two replicas,
            over a stage's computing, both on average over the stages; each flow has its own bandwidth, 0.8 GB/s and 0.32 on C; every device computes as many rows as in the paper's
            profiles."""
        ),
        table(("model", "cluster", "plan", "the paper:", "ours:", "ratio:"), rows),
        bullets(
            [
                "GNMT-16, 8:8: ours hands over twice as much a row, since the attention's result goes to every "
                "layer of the decoder beside the last layer's output; the paper's figure fits one of the "
                "two.",
                "BERT-48: two thirds in all three plans, so it is the ratio of a block's time to what a "
                "row hands over; ours has sequences of 384.",
                "AmoebaNet-36, 11:5: less, since behind our 27th normal cell the sides have just been "
                "halved a last time; the paper's figure fits a cut before that reduction better.",
                "The others are within a third; the times are from another source (shapes and a roofline "
                "here, measurements there).",
            ]
        ),
    )
