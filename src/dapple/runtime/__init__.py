"""The pipeline runtime: trains a captured model by a plan, one process per device.

Each name is loaded when it is first used: who starts a run, or watches one, needs little of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dapple.runtime.optimizers import Parameters as Parameters
    from dapple.runtime.results import Evaluation as Evaluation
    from dapple.runtime.results import StepResult as StepResult
    from dapple.runtime.sampling import PlanSampler as PlanSampler
    from dapple.runtime.topology import Topology as Topology
    from dapple.runtime.trainer import Trainer as Trainer

_MODULES = {
    "Evaluation": "results",
    "Parameters": "optimizers",
    "PlanSampler": "sampling",
    "StepResult": "results",
    "Topology": "topology",
    "Trainer": "trainer",
}

__all__ = ["Evaluation", "Parameters", "PlanSampler", "StepResult", "Topology", "Trainer"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dapple.runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dapple.runtime.{_MODULES[name]}"), name)
