"""The runs that are held against one process."""

from __future__ import annotations

from typing import Any

from tests.runtime.cases import Run
from tests.runtime.pairwise import pairwise

FACTORS: dict[str, Any] = {
    "replicas": [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3), (1, 1, 1), (2, 1, 2)],
    # "gpt": tied weights, a loss over unmasked tokens, pieces without any.
    # "skip": a skip over stages, a bool. "inside": the model returns its loss. "mlp": in place.
    "model": ["gpt", "skip", "inside", "mlp"],
    "num_micro_batches": [1, 2, 5],
    "rows": [12, 13],
    "optimizer": ["sgd", "adamw"],
    "schedule": ["early-backward", "gpipe"],
    "split": ["even", "early"],
}

PAIRWISE_RUNS: list[Run] = [Run(**row) for row in pairwise(FACTORS)]  # type: ignore[arg-type]

# (plan's batch, M, batch of each step): other sizes than the plan's, replicas without rows, more
# micro-batches than rows, fewer micro-batches than stages.
ODD_BATCHES = [
    (12, 5, (1, 2, 13)),
    (4, 5, (4, 4, 4)),
    (3, 1, (3, 30, 2)),
    (8, 4, (7, 1, 40)),
]

ODD_RUNS: list[Run] = [
    Run(model, replicas, micro_batches, rows, step_rows, split="early")
    for model, replicas in [("gpt", (3, 2)), ("skip", (2, 1, 2)), ("inside", (1, 1))]
    for rows, micro_batches, step_rows in ODD_BATCHES
]

# State shared out, also of more replicas than parameters, and of a tied parameter's two stages.
SHARDED_RUNS: list[Run] = [
    Run("gpt", (3, 2), shard="optimizer"),
    Run("skip", (2, 1, 2), 5, 13, optimizer="sgd", shard="optimizer"),
]

# Messages of several stages in one queue, tied weights and skips across them, and split backwards.
SCHEDULE_RUNS: list[Run] = [
    Run("gpt", (2, 1), 5, 13, optimizer="sgd", schedule="interleaved", virtual=2),
    Run("skip", (1, 1), 4, 12, schedule="interleaved", virtual=3),
    Run("gpt", (1, 2), 4, 13, schedule="zero-bubble"),
]

# Tensors that cross cuts and have no gradient.
LEFT_OUT_RUNS: list[Run] = [
    Run("beside", (2, 1), 5, 13),
    Run("beside", (1, 3), 2, 12, (12, 2), "sgd", schedule="zero-bubble"),
]

ALL_RUNS: list[Run] = [
    *PAIRWISE_RUNS,
    *ODD_RUNS,
    *SHARDED_RUNS,
    *SCHEDULE_RUNS,
    *LEFT_OUT_RUNS,
]
