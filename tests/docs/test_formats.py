"""docs/formats.md is complete and true: each field is named, each example loads."""

from __future__ import annotations

import json
import tomllib

import pytest
from pydantic import BaseModel

from dapple import job
from dapple.cluster import Cluster, DeviceKind, Link, Machines, parse_cluster
from dapple.planner import make_plan
from dapple.records import ModelProfile, Plan, Record, Timeline
from dapple.records.base import validate_record
from dapple.records.explanation import Alternative, Explanation
from dapple.records.plan import Predicted, PredictedStage, StagePlan
from dapple.records.profile import LayerProfile, TensorProfile, TiedGroup, TiedMember
from dapple.records.text_profile import load_text_profile
from dapple.records.timeline import Span
from dapple.schedule import check_schedule, load_schedule
from dapple.simulator import simulate
from tests.docs.blocks import example, section

FORMATS = "docs/formats.md"
SECTIONS: dict[str, list[type[BaseModel]]] = {
    "Profile": [ModelProfile, LayerProfile, TensorProfile, TiedGroup, TiedMember],
    "Cluster": [Cluster, Machines, DeviceKind, Link],
    "Plan": [Plan, StagePlan, Predicted, PredictedStage, Explanation, Alternative],
    "Timeline": [Timeline, Span],
}


@pytest.mark.parametrize(
    ("title", "record"), [(title, record) for title in SECTIONS for record in SECTIONS[title]]
)
def test_every_field_of_a_record_is_explained(title: str, record: type[BaseModel]):
    """In the section of its file."""
    text = section(FORMATS, title)
    assert [name for name in record.model_fields if f"`{name}`" not in text] == []


def test_every_field_of_a_job_is_explained():
    """As `section.field`."""
    text = section(FORMATS, "Job")
    for name, field in job.Job.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            assert [f for f in kind.model_fields if f"`{name}.{f}`" not in text] == []
        else:
            assert f"`{name}`" in text


@pytest.mark.parametrize(
    ("mark", "kind"), [("profile", ModelProfile), ("plan", Plan), ("timeline", Timeline)]
)
def test_the_examples_of_records_load(mark: str, kind: type[Record]):
    """And are what is written: nothing is lost on the way."""
    data = json.loads(example(FORMATS, mark))
    record = validate_record(kind, data, mark)
    assert kind.model_validate_json(record.to_json()) == record


def test_the_examples_fit_together(tmp_path):
    """The plan is one for the profile; the cluster takes a plan of its own."""
    profile = validate_record(ModelProfile, json.loads(example(FORMATS, "profile")), "profile")
    plan = validate_record(Plan, json.loads(example(FORMATS, "plan")), "plan")
    assert simulate(plan, profile).step_seconds > 0
    cluster = parse_cluster(example(FORMATS, "cluster"), "lab.toml")
    assert (cluster.num_machines, cluster.num_devices) == (3, 10)
    made = make_plan(profile, cluster, 8, planner="dp")
    assert made.cluster == cluster


def test_the_text_profile_loads(tmp_path):
    """Milliseconds and bytes."""
    path = tmp_path / "graph.txt"
    path.write_text(example(FORMATS, "text profile"))
    profile = load_text_profile(path, 4)
    assert [layer.forward_seconds for layer in profile.layers] == [(0.0015,), (0.002,)]
    assert profile.tensors[0].bytes_per_sample == 2048 / 4


def test_the_schedule_loads_and_ends(tmp_path):
    """Split backwards on the first position, whole ones on the second."""
    path = tmp_path / "own.csv"
    path.write_text(example(FORMATS, "schedule"))
    schedule = load_schedule(path)
    check_schedule(schedule)
    assert (schedule.num_positions, schedule.num_micro_batches) == (2, 2)


def test_the_job_loads_and_shows_every_section(tmp_path):
    """With a field for everything that a job can say."""
    text = example(FORMATS, "job")
    path = tmp_path / "job.toml"
    path.write_text(text)
    loaded = job.load_job(path)
    assert set(tomllib.loads(text)) == set(type(loaded).model_fields)
    assert loaded.cluster.memory == 4 * 2**30


def test_the_metrics_name_the_fields_that_runs_write():
    """One row of each kind."""
    rows = [json.loads(line) for line in example(FORMATS, "metrics").splitlines()]
    text = section(FORMATS, "Metrics")
    assert all(f"`{name}`" in text for row in rows for name in row)
    assert [sorted(row) for row in rows] == [
        ["elapsed_seconds", "step", "validation_loss"],
        ["elapsed_seconds", "loss", "rows", "seconds", "step"],
    ]
