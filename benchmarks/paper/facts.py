"""What the paper prints (DAPPLE, PPoPP 2021, sections 3 and 6), as numbers to compare with."""

from __future__ import annotations

from dataclasses import dataclass

MODELS = ("resnet-50", "vgg-19", "gnmt-16", "bert-48", "xlnet-36", "amoebanet-36")
CLUSTERS = ("config-a", "config-b", "config-c")
BATCHES = {
    "resnet-50": 2048,
    "vgg-19": 2048,
    "gnmt-16": 1024,
    "bert-48": 64,
    "xlnet-36": 128,
    "amoebanet-36": 128,
}
"""Global batch sizes of the table of plans."""
DEVICE = "v100-16gb"


@dataclass(frozen=True)
class PaperPlan:
    """A plan of the paper.

    Attributes:
        shape: "DP", "straight", or "P:Q".
        cut: the layers of the first stage, as the paper counts them.
        layers: of the whole model, counted alike.
        behind: our layers that the cut can be behind; with several the best one is taken.
    """

    shape: str
    cut: int = 0
    layers: int = 0
    behind: tuple[str, ...] = ()

    @property
    def replicas(self) -> tuple[int, int]:
        """P and Q of "P:Q"."""
        first, second = map(int, self.shape.split(":"))
        return first, second

    @property
    def split(self) -> str:
        """The cut as the paper prints it, such as "9:7"."""
        return f"{self.cut}:{self.layers - self.cut}"


_DP, _STRAIGHT = PaperPlan("DP"), PaperPlan("straight")
_GNMT = PaperPlan("8:8", 9, 16, ("first", "attention"))
_XLNET = PaperPlan("8:8", 18, 36, ("blocks.17",))
_AMOEBANET = PaperPlan("11:5", 27, 36, ("cells.30",))

PLANS: dict[str, tuple[PaperPlan, PaperPlan, PaperPlan]] = {
    "resnet-50": (_DP, _DP, _DP),
    "vgg-19": (_DP, _DP, PaperPlan("15:1", 13, 19, ("features.12",))),
    "gnmt-16": (_GNMT, _GNMT, _STRAIGHT),
    "bert-48": (PaperPlan("8:8", 23, 48, ("blocks.22",)), _STRAIGHT, _STRAIGHT),
    "xlnet-36": (_XLNET, _XLNET, _STRAIGHT),
    "amoebanet-36": (
        PaperPlan("8:8", 24, 36, ("cells.26", "cells.27")),
        _AMOEBANET,
        _AMOEBANET,
    ),
}
"""The table of plans: for each model those on configurations A, B and C."""
ACRS = {
    ("vgg-19", "config-c"): 0.40,
    ("gnmt-16", "config-a"): 0.10,
    ("gnmt-16", "config-b"): 0.10,
    ("gnmt-16", "config-c"): 3.75,
    ("bert-48", "config-a"): 0.06,
    ("bert-48", "config-b"): 0.50,
    ("bert-48", "config-c"): 1.25,
    ("xlnet-36", "config-a"): 0.03,
    ("xlnet-36", "config-b"): 0.03,
    ("xlnet-36", "config-c"): 0.67,
    ("amoebanet-36", "config-a"): 0.18,
    ("amoebanet-36", "config-b"): 0.14,
    ("amoebanet-36", "config-c"): 0.35,
}
"""Activation communication ratios in the table of plans."""
PROFILE_ROWS = {
    "vgg-19": 32,
    "gnmt-16": 64,
    "bert-48": 2,
    "bert-large": 2,
    "xlnet-36": 1,
    "amoebanet-36": 1,
}
"""The profiles' batch sizes; BERT-Large's is not told and taken to be BERT-48's."""
COUNTED = {
    "vgg-19": "16 convolutions and 3 linear layers (13:6)",
    "gnmt-16": "16 LSTM layers (9:7: the encoder and the decoder's first; with the attention behind "
    "it in either stage, whichever is faster)",
    "bert-48": "48 blocks (23:25); embeddings first, answer head last",
    "xlnet-36": "36 blocks (18:18); embeddings first, answer head last",
    "amoebanet-36": "36 normal cells (24:12 and 27:9); the reduction cell between the 24th and the "
    "25th in either stage, whichever is faster",
}
"""What the paper's cuts count, and where our graph has more to place."""

REFERENCE_GAINS = {
    ("xlnet-36", "config-b"): "9-21 %",
    ("xlnet-36", "config-c"): "9-21 %",
    ("gnmt-16", "config-b"): "9-21 %",
    ("gnmt-16", "config-c"): "9-21 %",
    ("amoebanet-36", "config-b"): "9-21 %",
    ("amoebanet-36", "config-c"): "9-21 %",
    ("amoebanet-36", "config-a"): "37 %",
    ("vgg-19", "config-c"): "130 %",
}
"""How much longer the paper's plan took than the best one in an independent model of flows that
share nothing, with times in proportion to rows and memory unchecked."""

POLICY_GAINS = {
    "bert-48": (0.06, 1.00),
    "xlnet-36": (0.03, 1.02),
    "vgg-19": (0.16, 1.10),
    "gnmt-16": (0.10, 1.31),
}
"""ACR, and throughput with warm-up policy B over policy A."""

GPIPE_CELLS = {
    ("gpipe", 2): (5.10, 12.1),
    ("gpipe", 5): None,
    ("gpipe", 8): None,
    ("gpipe", 16): None,
    ("gpipe+recompute", 2): (4.00, 9.9),
    ("gpipe+recompute", 5): (5.53, 13.2),
    ("gpipe+recompute", 8): None,
    ("gpipe+recompute", 16): None,
    ("dapple", 2): (5.10, 10.6),
    ("dapple", 8): (7.60, 10.6),
    ("dapple", 16): (8.18, 10.6),
    ("dapple+recompute", 2): (4.24, 8.5),
    ("dapple+recompute", 8): (6.23, 8.5),
    ("dapple+recompute", 16): (6.77, 8.5),
}
"""BERT-48 in two stages, micro-batch 2, configuration B: samples/s and average peak GB by (run, M);
None: out of memory; what is missing here the paper leaves out. GPipe runs out of memory at M = 3."""

PLANNER_SPEEDUPS = {
    ("xlnet-36", "config-a"): (14.9, 8.6),
    ("bert-large", "config-a"): (14.5, 11.5),
    ("amoebanet-36", "config-a"): (11.6, 6.3),
    ("vgg-19", "config-a"): (9.6, 3.0),
    ("xlnet-36", "config-a:4x8"): (23.8, 15.7),
    ("bert-large", "config-a:4x8"): (24.4, 19.2),
    ("amoebanet-36", "config-a:4x8"): (12.7, 7.4),
    ("vgg-19", "config-a:4x8"): (16.3, 2.2),
}
"""Speedup over one device of DAPPLE's and of PipeDream's plan, by (model, cluster)."""
PLANNER_BATCHES = {"xlnet-36": 128, "bert-large": 128, "amoebanet-36": 128, "vgg-19": 1024}

HYBRID_AVERAGES = {"config-a": 1.71, "config-b": 1.37, "config-c": 1.79}
"""The best hybrid over data parallelism with overlap, on average."""
HYBRID_MOST = 2.32
"""The most, with GNMT-16 on configuration C."""

LARGEST_BERT = {
    1: (48, 640e6, 0.93),
    2: (106, 1.4e9, 0.89),
    4: (215, 2.7e9, 0.89),
    8: (428, 5.5e9, 0.87),
}
"""Devices: blocks, parameters and utilisation of the largest BERT with recomputation."""
