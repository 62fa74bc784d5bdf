"""The simulator: one training step of a plan by the rules of docs/semantics.md.

    timeline = simulate(plan, profile)             spans of every rank, for reading and drawing
    predicted = predict(plan, profile)             the figures saved with a plan

A search keeps one cost model, which caches what ranges of layers cost, and asks for seconds only:

    model = CostModel(profile, cluster, "shared")
    seconds = step_seconds(model, stages, global_batch_size, num_micro_batches)

where `stages` is a sequence of StagePlan. Memory is `dapple.costs.stage_memory`.

Two engines give the same times. The static one serves pipelines in which no two flows can ever
slow each other down (always so in the paper's network model): each time is a maximum over
earlier ones. The other one is an event heap with network cards that flows share.
"""

from dapple.simulator.simulation import predict, schedule_of, simulate, step_seconds
from dapple.simulator.trace import Trace

__all__ = ["Trace", "predict", "schedule_of", "simulate", "step_seconds"]
