"""dapple: plan and run pipeline and data parallel training of an unmodified PyTorch model.

    graph = dapple.capture(model, inputs, loss=loss)                 a row of layers
    profile, cluster = dapple.profile(factory, devices=2)            what each costs here
    plan = dapple.plan(profile, cluster, global_batch_size=64)       the best plan that fits
    timeline = dapple.simulate(plan, profile)                        what to expect
    trainer = dapple.Trainer(graph, plan, make_optimizer)            one per rank, under torchrun

Only `capture`, `profile`, `Trainer`, `PlanSampler` and `Workload` import torch, when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dapple.errors import DappleError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dapple.cluster import Cluster as Cluster
    from dapple.cluster import load_cluster as load_cluster
    from dapple.graph import LayerGraph as LayerGraph
    from dapple.graph import capture as capture
    from dapple.planner import make_plan as plan  # noqa: F401
    from dapple.profiler import profile as profile
    from dapple.records import ModelProfile as ModelProfile
    from dapple.records import Plan as Plan
    from dapple.records import Timeline as Timeline
    from dapple.records import load_record as load_record
    from dapple.runtime import PlanSampler as PlanSampler
    from dapple.runtime import Trainer as Trainer
    from dapple.simulator import simulate as simulate
    from dapple.workload import Workload as Workload

# Public name -> (module, name there). Loaded on first use: planning never imports torch.
_PUBLIC = {
    "Cluster": ("dapple.cluster", "Cluster"),
    "LayerGraph": ("dapple.graph", "LayerGraph"),
    "ModelProfile": ("dapple.records", "ModelProfile"),
    "Plan": ("dapple.records", "Plan"),
    "PlanSampler": ("dapple.runtime", "PlanSampler"),
    "Timeline": ("dapple.records", "Timeline"),
    "Trainer": ("dapple.runtime", "Trainer"),
    "Workload": ("dapple.workload", "Workload"),
    "capture": ("dapple.graph", "capture"),
    "load_cluster": ("dapple.cluster", "load_cluster"),
    "load_record": ("dapple.records", "load_record"),
    "plan": ("dapple.planner", "make_plan"),
    "profile": ("dapple.profiler", "profile"),
    "simulate": ("dapple.simulator", "simulate"),
}

__all__ = ["DappleError", "__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dapple' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
