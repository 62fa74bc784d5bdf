"""Capture of a model as a graph of layers, and stage modules cut out of it."""

from dapple.graph.capture import CaptureWarning, capture, is_warning
from dapple.graph.layers import InputSpec, LayerGraph
from dapple.graph.lengths import Rows
from dapple.graph.program import BoundaryTensor
from dapple.graph.results import OutputSpec
from dapple.graph.seeds import SeedLayer, leave_generators
from dapple.graph.stage import StageProgram

__all__ = [
    "BoundaryTensor",
    "CaptureWarning",
    "InputSpec",
    "LayerGraph",
    "OutputSpec",
    "Rows",
    "SeedLayer",
    "StageProgram",
    "capture",
    "is_warning",
    "leave_generators",
]
