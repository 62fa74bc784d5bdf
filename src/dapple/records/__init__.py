"""The values that people save, read and hand to the next verb."""

from dapple.records.base import Record, load_record
from dapple.records.explanation import Alternative, Explanation
from dapple.records.plan import MOST_MICRO_BATCHES, Plan, Predicted, PredictedStage, StagePlan
from dapple.records.profile import LayerProfile, ModelProfile, TensorProfile, TiedGroup, TiedMember
from dapple.records.timeline import Span, Timeline

__all__ = [
    "MOST_MICRO_BATCHES",
    "Alternative",
    "Explanation",
    "LayerProfile",
    "ModelProfile",
    "Plan",
    "Predicted",
    "PredictedStage",
    "Record",
    "Span",
    "StagePlan",
    "TensorProfile",
    "TiedGroup",
    "TiedMember",
    "Timeline",
    "load_record",
]
