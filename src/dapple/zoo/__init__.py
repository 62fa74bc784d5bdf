"""Models to try dapple on, as plain modules, and real text for the GPT (`dapple.zoo.text`).

The modules themselves import torch and nothing of dapple: they stand for a user's own model.
"""

from dapple.workload import Workload
from dapple.zoo.amoebanet import AmoebaNet
from dapple.zoo.benchmarks import BENCHMARKS
from dapple.zoo.bert import BERT, answer_loss
from dapple.zoo.gnmt import GNMT
from dapple.zoo.gpt import GPT, next_byte_loss, unmasked_tokens
from dapple.zoo.mlp import MLP, mean_squared_error
from dapple.zoo.resnet import ResNet
from dapple.zoo.skip import SkipNet
from dapple.zoo.vgg import VGG
from dapple.zoo.workloads import (
    ZOO,
    gpt_workload,
    make_workload,
    mlp_workload,
    skipnet_workload,
)
from dapple.zoo.xlnet import XLNet

__all__ = [
    "BENCHMARKS",
    "BERT",
    "GNMT",
    "GPT",
    "MLP",
    "VGG",
    "ZOO",
    "AmoebaNet",
    "ResNet",
    "SkipNet",
    "Workload",
    "XLNet",
    "answer_loss",
    "gpt_workload",
    "make_workload",
    "mean_squared_error",
    "mlp_workload",
    "next_byte_loss",
    "skipnet_workload",
    "unmasked_tokens",
]
