"""The pipeline runtime: trains a captured model by a plan, one process per device."""

from dapple.runtime.optimizers import Parameters
from dapple.runtime.results import Evaluation, StepResult
from dapple.runtime.sampling import PlanSampler
from dapple.runtime.topology import Topology
from dapple.runtime.trainer import Trainer

__all__ = ["Evaluation", "Parameters", "PlanSampler", "StepResult", "Topology", "Trainer"]
