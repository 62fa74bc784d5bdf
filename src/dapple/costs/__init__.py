"""Costs of a plan: seconds and bytes of every replica, message and AllReduce.

    model = CostModel(profile, cluster, "shared")        keep it: answers are cached
    costs = pipeline_costs(model, stages, global_batch_size, num_micro_batches)
    memory = stage_memory(model, stages, 0, micro_batch_rows, in_flight)

`model.stage_seconds(start, stop, rows)`, `model.crossing(range, range)`, `model.parameter_bytes`,
`model.network.route(device, device)` and `model.network.ring(devices)` are what latency formulas
need.
"""

from dapple.costs.interpolation import bytes_at, seconds_at
from dapple.costs.memory import StageMemory, fullest_memory, stage_memory
from dapple.costs.model import CostModel, Crossing, bucket_bytes, recomputed_ranges
from dapple.costs.network import NO_CARD, Network, Ring, Route
from dapple.costs.pipeline import Channel, GradientSum, PipelineCosts, pipeline_costs
from dapple.costs.rank_memory import rank_peak_bytes
from dapple.costs.rows import overlaps, proportional_rows, split_rows
from dapple.costs.shards import shard_owners, state_shares, update_seconds
from dapple.costs.statistics import statistics_seconds
from dapple.costs.symmetry import merge_equal_replicas

__all__ = [
    "NO_CARD",
    "Channel",
    "CostModel",
    "Crossing",
    "GradientSum",
    "Network",
    "PipelineCosts",
    "Ring",
    "Route",
    "StageMemory",
    "bucket_bytes",
    "bytes_at",
    "fullest_memory",
    "merge_equal_replicas",
    "overlaps",
    "pipeline_costs",
    "proportional_rows",
    "rank_peak_bytes",
    "recomputed_ranges",
    "seconds_at",
    "shard_owners",
    "split_rows",
    "stage_memory",
    "state_shares",
    "statistics_seconds",
    "update_seconds",
]
