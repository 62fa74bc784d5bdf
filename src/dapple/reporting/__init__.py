"""What people see of plans and timelines: tables, drawings, pictures, and traces for Perfetto."""

from dapple.reporting.comparison import comparison_table, plan_shape
from dapple.reporting.drawing import pipeline_drawing
from dapple.reporting.held import held_micro_batches
from dapple.reporting.picture import check_picture, save_picture
from dapple.reporting.profiles import profile_table
from dapple.reporting.tables import (
    Figure,
    compared_figures,
    plan_table,
    predicted_against_measured,
)
from dapple.reporting.trace import chrome_trace
from dapple.reporting.waiting import StageTime, stage_times, waiting_table

__all__ = [
    "Figure",
    "StageTime",
    "check_picture",
    "chrome_trace",
    "compared_figures",
    "comparison_table",
    "held_micro_batches",
    "pipeline_drawing",
    "plan_shape",
    "plan_table",
    "predicted_against_measured",
    "profile_table",
    "save_picture",
    "stage_times",
    "waiting_table",
]
