"""Bytes on a device, by the formula of docs/semantics.md."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple.costs import CostModel, StageMemory, shard_owners, stage_memory, state_shares
from dapple.records import (
    LayerProfile,
    ModelProfile,
    StagePlan,
    TensorProfile,
    TiedGroup,
    TiedMember,
)
from dapple.simulator import simulate
from tests.simulator.pipelines import cluster, plan


def profile(saved: tuple[int, ...] | None = (100,)) -> ModelProfile:
    """Four layers with 1000 parameter bytes, 100 saved per row, 10 between layers per row."""
    layers = tuple(
        LayerProfile(
            name=f"l{i}", forward_seconds=(1,), backward_seconds=(2,), parameter_bytes=1000,
            saved_bytes=saved, workspace_bytes=(50 + i,),
        )
        for i in range(4)
    )  # fmt: skip
    tensors = tuple(
        TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), bytes_per_sample=10)
        for i in range(3)
    )
    return ModelProfile(model="m", device="d", batch_sizes=(1,), layers=layers, tensors=tensors)


MODEL = CostModel(profile(), cluster(4))
STAGES = (
    StagePlan(start=0, stop=2, devices=(0, 1, 2), warmup=2),
    StagePlan(start=2, stop=4, devices=(3,), warmup=1),
)


def test_the_parts_follow_the_formula_for_the_replica_with_most_rows():
    """Seven rows: replicas of stage 0 hold 3, 2, 2; stage 1 holds all."""
    assert stage_memory(MODEL, STAGES, 0, 7, 2) == StageMemory(
        parameters=2000,
        gradients=2000,
        optimizer=4000,
        activations=2 * 3 * 200,
        received_inputs=0,
        received_gradients=2 * 3 * 10,
        sent_gradients=0,
        workspace=3 * 51,
    )
    last = stage_memory(MODEL, STAGES, 1, 7, 1, optimizer_state_factor=1)
    assert last is not None
    assert (last.activations, last.received_inputs) == (7 * 200, 2 * 7 * 10)
    assert last.sent_gradients == 2 * 7 * 10
    assert last.total == 2000 * 3 + 1400 + 140 + 140 + 7 * 53


def test_activations_grow_with_micro_batches_in_flight_and_with_nothing_else():
    """Early backward's bound: K_i, not M."""
    one, three = (stage_memory(MODEL, STAGES, 1, 7, k) for k in (1, 3))
    assert one is not None
    assert three is not None
    assert three.activations == 3 * one.activations
    assert (three.parameters, three.workspace) == (one.parameters, one.workspace)


def test_without_saved_bytes_memory_is_unknown():
    """None, never a guess."""
    assert stage_memory(CostModel(profile(None), cluster(4)), STAGES, 0, 7, 2) is None


def test_recompute_keeps_the_inputs_and_one_micro_batch():
    """Whole stage: no activations per micro-batch in flight, one in full."""
    stages = tuple(
        StagePlan(start=s, stop=s + 1 + (s == 1), devices=(s,), recompute=s == 1) for s in (0, 1)
    )
    memory = stage_memory(MODEL, stages, 1, 7, 3)
    assert memory is not None
    assert (memory.activations, memory.received_inputs) == (7 * 200, 4 * 7 * 10)


def test_recompute_keeps_the_models_last_layer():
    """Of the last stage's two layers the second stays, and so does the tensor between them."""
    stages = (STAGES[0], STAGES[1].model_copy(update={"recompute": True}))
    memory = stage_memory(MODEL, stages, 1, 7, 3)
    assert memory is not None
    assert memory.activations == 3 * 7 * (100 + 10) + 7 * 100


def test_recomputed_ranges_keep_the_tensors_between_them():
    """Layers 0 and 1 apart: the tensor between them stays, and one layer at a time is redone."""
    stages = (STAGES[0].model_copy(update={"recompute": ((0, 1), (1, 2))}), STAGES[1])
    memory = stage_memory(MODEL, stages, 0, 3, 2)
    assert memory is not None
    assert memory.activations == 2 * 10 + 100


def test_a_sharded_optimizer_is_divided_among_the_replicas():
    """Parameters and gradients are not. Without sizes of single parameters it divides evenly."""
    stages = (STAGES[0].model_copy(update={"shard": "optimizer"}), STAGES[1])
    memory = stage_memory(MODEL, stages, 0, 3, 2)
    assert memory is not None
    assert (memory.parameters, memory.optimizer) == (2000, 1334)


def test_a_shard_holds_whole_parameters():
    """Of 2 x (700 + 300) bytes three replicas keep 700, 700 and 600; a parameter of two stages is
    kept by each.
    """
    sized = profile().model_copy(
        update={
            "layers": tuple(
                layer.model_copy(update={"parameter_sizes": (700, 300)})
                for layer in profile().layers
            )
        }
    )
    tied = TiedGroup(
        parameter_bytes=300, members=tuple(TiedMember(layer=n, parameter="w") for n in (0, 3))
    )
    stage = STAGES[0].model_copy(update={"shard": "optimizer"})
    alone, shared = (
        state_shares(CostModel(p, cluster(4)), stage)
        for p in (sized, sized.model_copy(update={"tied": (tied,)}))
    )
    assert (alone, shared) == ((700, 700, 600), (1000, 1000, 600))
    parts = [
        stage_memory(CostModel(sized, cluster(4)), (stage, STAGES[1]), 0, 3, 2, replica=r)
        for r in (0, 2, None)
    ]
    assert [memory and memory.optimizer for memory in parts] == [1400, 1200, 1400]


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_shards_are_balanced(sizes: list[int], parts: int):
    """No part exceeds an equal share by more than the largest parameter."""
    loads = [0] * parts
    for size, owner in zip(sizes, shard_owners(sizes, parts), strict=True):
        loads[owner] += size
    assert max(loads) <= sum(sizes) / parts + max(sizes, default=0)


@pytest.mark.parametrize(("schedule", "held"), [("early-backward", 1), ("gpipe", 4)])
def test_the_timeline_has_each_ranks_peak_with_its_own_rows(schedule: str, held: int):
    """Ranks 0..2 are the replicas of stage 0; GPipe holds all four micro-batches."""
    made = plan([3, 1], 28, 4, cluster(4), warmup=[1, 1], cuts=[2, 4], schedule=schedule)
    timeline = simulate(made, profile())
    expected = [
        stage_memory(MODEL, made.stages, s, 7, held, replica=r)
        for s, r in ((0, 0), (0, 1), (0, 2), (1, 0))
    ]
    assert timeline.peak_bytes == tuple(memory and memory.total for memory in expected)
    assert timeline.peak_bytes[0] > timeline.peak_bytes[1]
