"""What a plan means for a captured model: who shares which parameter, who talks to whom."""

from __future__ import annotations

from collections.abc import Container

from dapple.errors import PlanError
from dapple.graph import LayerGraph
from dapple.records import Plan, StagePlan
from dapple.runtime.topology import Topology
from dapple.runtime.transport import DistributedTransport
from dapple.schedule import Link


def check_model(graph: LayerGraph, plan: Plan) -> None:
    """The plan was made for this model, and the runtime can run it.

    Raises:
        PlanError: it was not, or can not.
    """
    if plan.num_layers != graph.num_layers:
        raise PlanError(
            f"the plan covers {plan.num_layers} layers but {graph.name} has {graph.num_layers}; "
            "make a plan from this model's profile"
        )
    actual = graph.fingerprint
    if plan.model_fingerprint not in (None, actual):
        raise PlanError(
            f"the plan was made for a model with fingerprint {plan.model_fingerprint}, but "
            f"{graph.name} has {actual}; make a plan from this model's profile"
        )
    for number, stage in enumerate(plan.stages):
        _check_opaque(graph, number, stage)
        written = graph.written_buffers(stage.start, stage.stop, by_rows=True)
        if written and stage.replicas > 1:
            raise PlanError(
                f"stage {number} has {stage.replicas} replicas, and its forward updates buffer "
                f'"{written[0]}" from the rows that it sees, which differ from one replica to the '
                "next; plan one replica for it"
            )


def _check_opaque(graph: LayerGraph, number: int, stage: StagePlan) -> None:
    """Layers that are taken as they are can't be looked into."""
    norm = graph.opaque_batch_norm(stage.start, stage.stop)
    if norm is not None and stage.replicas > 1:
        raise PlanError(
            f'stage {number} has {stage.replicas} replicas and holds batch norm "{norm}" in a layer '
            "that torch.export can't look into, so that they can't share its statistics; plan one "
            "replica for it"
        )
    if stage.recompute and graph.opaque_writes(stage.start, stage.stop):
        raise PlanError(
            f"stage {number} recomputes a layer that torch.export can't look into and that writes "
            "into its buffers or inputs, which would happen twice; plan it without recompute"
        )


def tied_ranks(
    graph: LayerGraph, topology: Topology, trainable: Container[str]
) -> dict[str, tuple[int, ...]]:
    """For each tied parameter of this rank that others hold too, the ranks of all its holders.

    Args:
        graph: the captured model.
        topology: this rank's place.
        trainable: names of this rank's trainable parameters.
    """
    tied = {}
    for group in graph.tied:
        name, layers = group[0][1], [layer for layer, _ in group]
        ranks = topology.holders(layers)
        if name in trainable and len(ranks) > len(topology.ranks[topology.stage]):
            tied[name] = ranks
    return tied


def connect(graph: LayerGraph, topology: Topology) -> DistributedTransport:
    """The transport for a model's boundary tensors and gradients; all ranks call it."""
    groups = list(topology.ranks)
    groups += [topology.holders([layer for layer, _ in group]) for group in graph.tied]
    pairs = {
        (link.producer, link.consumer)
        for training in (True, False)
        for link in links_between_stages(graph, topology, training)
    }
    apart = sorted((a, b) for a, b in pairs if topology.ranks[a] != topology.ranks[b])
    statistics = [
        ranks
        for ranks, stage in zip(topology.ranks, topology.plan.stages, strict=True)
        if graph.uses_batch_statistics(stage.start, stage.stop)
        or graph.written_buffers(stage.start, stage.stop)
    ]
    return DistributedTransport(groups, apart, topology.ranks, statistics)


def links_between_stages(
    graph: LayerGraph, topology: Topology, training: bool = True
) -> tuple[Link, ...]:
    """Which stages exchange tensors, and whether gradients travel back; ascending."""
    stage_of = topology.stage_of_layer
    returns: dict[tuple[int, int], bool] = {}
    for tensor in graph.tensors(training):
        for consumer in tensor.consumers:
            pair = stage_of(tensor.producer), stage_of(consumer)
            if pair[0] != pair[1]:
                returns[pair] = returns.get(pair, False) or tensor.needs_grad
    return tuple(Link(*pair, returns[pair]) for pair in sorted(returns))
