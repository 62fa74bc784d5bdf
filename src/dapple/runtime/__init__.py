"""The pipeline runtime: trains a captured model by a plan, one process per device."""

from dapple.runtime.topology import Topology
from dapple.runtime.trainer import StepResult, Trainer

__all__ = ["StepResult", "Topology", "Trainer"]
