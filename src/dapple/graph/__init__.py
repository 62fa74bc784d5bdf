"""Capture of a model as a graph of layers, and stage modules cut out of it."""

from dapple.graph.capture import InputSpec, LayerGraph, capture
from dapple.graph.program import BoundaryTensor
from dapple.graph.stage import StageProgram

__all__ = ["BoundaryTensor", "InputSpec", "LayerGraph", "StageProgram", "capture"]
