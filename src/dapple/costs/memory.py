"""Bytes on a device: docs/semantics.md, section "Memory of a device"."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dapple.cluster import Cluster
from dapple.costs.model import CostModel, recomputed_ranges
from dapple.costs.rows import overlaps, split_rows
from dapple.costs.shards import state_shares
from dapple.records import StagePlan


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one replica of a stage, by what they are for.

    Attributes:
        parameters, gradients, optimizer: once per stage, a tied parameter once.
        activations: K_i saved micro-batches; with recompute what is kept of each, and one
            recomputed range in full.
        received_inputs: K_i + 1 buffers (rule 4).
        received_gradients: 2 buffers (rule 5).
        sent_gradients: K_i + 1 that are under way to earlier stages, or may be.
        workspace: the largest of the stage's layers.
        casts: copies of weights in the type of autocast.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    received_inputs: int
    received_gradients: int
    sent_gradients: int
    workspace: int
    casts: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return self.parameters + self.gradients + self.optimizer + self.casts + self.dynamic

    @property
    def dynamic(self) -> int:
        """The parts that grow with the rows of a micro-batch."""
        messages = self.received_inputs + self.received_gradients + self.sent_gradients
        return self.activations + messages + self.workspace


def stage_memory(
    model: CostModel,
    stages: Sequence[StagePlan],
    number: int,
    micro_batch_rows: int,
    in_flight: int,
    *,
    optimizer_state_factor: float = 2.0,
    replica: int | None = None,
) -> StageMemory | None:
    """Bytes that a replica of stage `number` holds at its peak.

    Args:
        model: costs of layers.
        stages: all stages of the plan: what is received depends on the neighbours.
        micro_batch_rows: rows of the largest micro-batch, before the replica split.
        in_flight: K_i, at most M.
        optimizer_state_factor: optimizer state in units of the parameters' bytes.
        replica: which replica; None: the one with most rows, and with the largest share of a
            sharded optimizer.

    Returns:
        The parts, or None when the profile has no saved bytes for a layer of the stage.
    """
    stage = stages[number]
    split = split_rows(micro_batch_rows, stage.replicas, stage.rows)
    shares = state_shares(model, stage)
    state = max(shares) if replica is None else shares[replica]
    if replica is None:
        replica = split.index(max(split))
    kept = _activation_bytes(model, stage, split[replica], in_flight)
    if kept is None:
        return None
    inputs, gradients, sent = _boundary_bytes(model, stages, number, split, replica)
    parameters = model.parameter_bytes(stage.start, stage.stop)
    return StageMemory(
        parameters=parameters,
        gradients=parameters,
        optimizer=math.ceil(state * optimizer_state_factor),
        activations=math.ceil(kept),
        received_inputs=math.ceil((in_flight + 1) * inputs),
        received_gradients=math.ceil(2 * gradients),
        sent_gradients=math.ceil((in_flight + 1) * sent),
        workspace=math.ceil(model.workspace_bytes(stage.start, stage.stop, split[replica])),
        casts=model.cast_bytes(stage.start, stage.stop),
    )


def fullest_memory(cluster: Cluster, stage: StagePlan) -> int:
    """Bytes of the device that a stage's peak is on: the smallest of those with most rows."""
    kinds = cluster.kind_of_device()
    most = max(stage.rows) if stage.rows else None
    shares = stage.rows or (None,) * stage.replicas
    return min(
        kinds[device].memory
        for device, share in zip(stage.devices, shares, strict=True)
        if share == most
    )


def _activation_bytes(
    model: CostModel, stage: StagePlan, rows: int, in_flight: int
) -> float | None:
    saved: list[float] = []
    for layer in range(stage.start, stage.stop):
        value = model.saved_bytes(layer, rows)
        if value is None:
            return None
        saved.append(value)
    if not stage.recompute:
        return in_flight * sum(saved)
    largest = 0.0
    for start, stop in recomputed_ranges(stage, len(model.profile.layers)):
        part = slice(start - stage.start, stop - stage.start)
        largest = max(largest, sum(saved[part]))
        saved[part] = [0.0] * (stop - start)
    return in_flight * (sum(saved) + _bytes_between_ranges(model, stage, rows)) + largest


def _bytes_between_ranges(model: CostModel, stage: StagePlan, rows: int) -> float:
    # A tensor counts at its producer. If that is recomputed but a consumer outside its range
    # needs the tensor, it is kept all the same.
    total = 0.0
    for start, stop in recomputed_ranges(stage, len(model.profile.layers)):
        for tensor in model.profile.tensors:
            outside = any(stop <= layer < stage.stop for layer in tensor.consumers)
            if start <= tensor.producer < stop and outside:
                total += tensor.bytes_per_sample * rows + tensor.fixed_bytes
    return total


def _boundary_bytes(
    model: CostModel, stages: Sequence[StagePlan], number: int, split: tuple[int, ...], replica: int
) -> tuple[float, float, float]:
    """Of one micro-batch: received inputs, received gradients, sent gradients."""
    here, devices = (stages[number].start, stages[number].stop), stages[number].devices
    inputs = gradients = sent = 0.0
    for other, stage in enumerate(stages):
        if other == number:
            continue
        there = (stage.start, stage.stop)
        crossing = model.crossing(there, here) if other < number else model.crossing(here, there)
        if crossing is None:
            continue
        senders = split_rows(sum(split), stage.replicas, stage.rows)
        for rows in _message_rows(senders, split)[replica]:
            if other < number:
                # From a stage of the same devices it is the producer's own tensor.
                if stage.devices != devices:
                    inputs += crossing.forward_bytes(rows)
                    sent += crossing.backward_bytes(rows)
            else:
                gradients += crossing.backward_bytes(rows)
    return inputs, gradients, sent


@functools.lru_cache(maxsize=256)
def _message_rows(senders: tuple[int, ...], receivers: tuple[int, ...]) -> list[list[int]]:
    """Per receiver the rows of each of its messages; asked for once per replica of a stage."""
    messages: list[list[int]] = [[] for _ in receivers]
    for _, receiver, rows in overlaps(senders, receivers):
        messages[receiver].append(rows)
    return messages
