"""Models to try dapple on, as plain modules, and real text for the GPT (`dapple.zoo.text`).

The modules themselves import torch and nothing of dapple: they stand for a user's own model.
"""

from dapple.workload import Workload
from dapple.zoo.gpt import GPT, next_byte_loss, unmasked_tokens
from dapple.zoo.mlp import MLP, mean_squared_error
from dapple.zoo.skip import SkipNet
from dapple.zoo.workloads import (
    ZOO,
    gpt_workload,
    make_workload,
    mlp_workload,
    skipnet_workload,
)

__all__ = [
    "GPT",
    "MLP",
    "ZOO",
    "SkipNet",
    "Workload",
    "gpt_workload",
    "make_workload",
    "mean_squared_error",
    "mlp_workload",
    "next_byte_loss",
    "skipnet_workload",
    "unmasked_tokens",
]
