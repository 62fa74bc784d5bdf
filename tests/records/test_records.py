"""Saved records: through files and back, and what is wrong with a file."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple.errors import DappleError, FileError
from dapple.records import ModelProfile, Plan, Record, Timeline, load_record
from dapple.records.base import validate_record
from dapple.simulator import predict, simulate
from tests.simulator.pipelines import chain, cluster, plan, random_plans

PROFILE = chain([1, 1, 1], [2, 2, 2], bytes_per_row=8, parameter_bytes=4)
PLAN = plan([2, 1, 1], 8, 4, cluster(4))


def changed(record: Record, path: str, value: Any) -> dict[str, Any]:
    """The record's JSON with one value replaced; "a.0.b" is a path, DELETE removes the field."""
    data = json.loads(record.to_json())
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    here = data
    for part in way:
        here = here[part]
    if value is DELETE:
        del here[last]
    else:
        here[last] = value
    return data


DELETE = object()


@given(random_plans(contended=True))
def test_profiles_plans_and_timelines_round_trip_through_files(tmp_path_factory, case):
    """Written as JSON and read again, each is equal and has the same fingerprint."""
    made, profile = case
    made = made.model_copy(update={"predicted": predict(made, profile)})
    folder = tmp_path_factory.mktemp("records")
    for record in (made, profile, simulate(made, profile)):
        path = folder / "deeper" / "record.json"
        record.save(path)
        again = load_record(type(record), path)
        assert again == record
        assert again.fingerprint() == record.fingerprint()
    assert [file.name for file in (folder / "deeper").iterdir()] == ["record.json"]


def test_a_fingerprint_changes_with_the_content():
    """One second more in one layer."""
    assert PROFILE.fingerprint() != chain([1, 1, 2], [2, 2, 2]).fingerprint()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model", DELETE, "model"),
        ("model", 3, "model"),
        ("format", "dapple-plan", "format"),
        ("version", 2, "version"),
        ("colour", "red", "colour"),
        ("batch_sizes", [], "batch_sizes"),
        ("batch_sizes", [0], "batch_sizes"),
        ("batch_sizes", [2, 1], "must ascend"),
        ("batch_sizes", [1, 2], "forward_seconds has 1 values for 2 batch sizes"),
        ("layers", [], "layers"),
        ("layers.1.forward_seconds", [-1], "forward_seconds"),
        ("layers.1.forward_seconds", [float("nan")], "forward_seconds"),
        ("layers.1.forward_seconds", "slow", "forward_seconds"),
        ("layers.1.forward_seconds", [1e-320], "forward_seconds.0: 1e-320 is less than anything"),
        ("layers.1.backward_seconds", [1e10], "backward_seconds"),
        ("layers.1.optimizer_seconds", 5e-324, "optimizer_seconds: 5e-324 is less"),
        ("layers.2.parameter_bytes", 2**61, "parameter_bytes"),
        ("tensors.0.bytes_per_sample", 1e-320, "bytes_per_sample: 1e-320 is less"),
        ("layers.1.forward_seconds", [1, 2], "layer 1"),
        ("layers.2.parameter_bytes", -4, "parameter_bytes"),
        ("layers.2.saved_bytes", [1.5], "saved_bytes"),
        ("tensors.0.producer", -2, "producer"),
        ("tensors.0.producer", 1, "tensor t0: consumers [1]"),
        ("tensors.0.consumers", [3], "tensor t0: consumers [3]"),
        ("tensors.0.bytes_per_sample", float("inf"), "bytes_per_sample"),
        ("tied", [{"parameter_bytes": 1, "members": []}], "members"),
        (
            "tied",
            [{"parameter_bytes": 1, "members": [{"layer": 9, "parameter": "w"}] * 2}],
            "tied group w names a layer >= 3",
        ),
    ],
)
def test_a_bad_profile_is_refused_naming_file_and_field(path, value, words, tmp_path):
    """FileError, whatever is wrong."""
    _refused(ModelProfile, changed(PROFILE, path, value), words, tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("stages", [], "stages"),
        ("stages.1.start", 2, "stage 1 covers layers 2..2"),
        ("stages.1.stop", 3, "stage 2 covers layers 2..3"),
        ("stages.1.devices", [], "devices"),
        ("stages.1.devices", [0], "stage 1 uses devices [0] twice"),
        ("stages.0.devices", [0, 0], "stage 0 uses devices"),
        ("stages.1.devices", [9], "devices [9] are not in the cluster, which has 4"),
        ("stages.1.warmup", 0, "warmup"),
        ("stages.0.rows", [1.0], "rows has 1 shares, not 2"),
        ("micro_batch_size", 3, "micro_batch_size 3 must be"),
        ("num_micro_batches", 0, "num_micro_batches"),
        ("global_batch_size", -8, "global_batch_size"),
        ("network_model", "free", "network_model"),
        ("cluster", DELETE, "cluster"),
        ("cluster.machines.0.devices", -1, "devices"),
        ("predicted", {"step_seconds": "fast"}, "step_seconds"),
    ],
)
def test_a_bad_plan_is_refused_naming_file_and_field(path, value, words, tmp_path):
    """FileError, whatever is wrong."""
    _refused(Plan, changed(PLAN, path, value), words, tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("spans.0.kind", "lunch", "kind"),
        ("spans.0.start", "early", "start"),
        ("step_seconds", DELETE, "step_seconds"),
        ("source", "guessed", "source"),
    ],
)
def test_a_bad_timeline_is_refused_naming_file_and_field(path, value, words, tmp_path):
    """FileError, whatever is wrong."""
    _refused(Timeline, changed(simulate(PLAN, PROFILE), path, value), words, tmp_path)


def _refused(kind: type[Record], data: Any, words: str, tmp_path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FileError) as caught:
        load_record(kind, path)
    assert "bad.json" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"3", b"[" * 100_000, b'{"a": 1e999}']
)
def test_files_that_are_no_record_are_refused(content: bytes, tmp_path):
    """Empty, cut off, not text, another shape, nested without end."""
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    for kind in (Plan, ModelProfile, Timeline):
        with pytest.raises(FileError, match=r"bad\.json"):
            load_record(kind, path)


def test_missing_files_and_unwritable_places_are_refused(tmp_path):
    """Reading nothing, reading a folder, writing below a file."""
    with pytest.raises(FileError, match="none"):
        load_record(Plan, tmp_path / "none.json")
    with pytest.raises(FileError):
        load_record(Plan, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="cannot write"):
        PLAN.save(tmp_path / "file" / "plan.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(
    st.sampled_from([(Plan, PLAN), (ModelProfile, PROFILE)]),
    st.data(),
    json_values,
)
def test_no_value_in_any_field_raises_anything_but_a_dapple_error(case, data, value):
    """Never a traceback of another type."""
    kind, record = case
    content = json.loads(record.to_json())
    here: Any = content
    while True:
        key = data.draw(st.sampled_from(list(here) if isinstance(here, dict) else range(len(here))))
        if not isinstance(here[key], (dict, list)) or not here[key] or data.draw(st.booleans()):
            break
        here = here[key]
    here[key] = value
    with contextlib.suppress(DappleError):
        assert isinstance(validate_record(kind, content, "x.json"), kind)


def test_ranks_are_the_used_devices_in_ascending_order():
    """Stages may use devices in any order."""
    swapped = PLAN.model_copy(
        update={
            "stages": tuple(
                stage.model_copy(update={"devices": devices})
                for stage, devices in zip(PLAN.stages, [(3, 1), (0,), (2,)], strict=True)
            )
        }
    )
    assert swapped.rank_of_device() == {0: 0, 1: 1, 2: 2, 3: 3}
    assert (swapped.num_devices, swapped.num_stages, swapped.num_layers) == (4, 3, 3)


def test_a_timelines_bubble_is_the_time_without_compute():
    """Two ranks, 4 s, 5 s of compute: 3/8 idle; waiting and transfers are not compute."""
    spans = [(0, "forward", 0, 2), (0, "backward", 2, 4), (1, "forward", 2, 3), (1, "send", 0, 4)]
    timeline = Timeline.model_validate(
        {
            "step_seconds": 4,
            "machine_of_rank": [0, 0],
            "spans": [
                {"rank": r, "stage": r, "replica": 0, "kind": k, "start": a, "end": b}
                for r, k, a, b in spans
            ],
        }
    )
    assert timeline.bubble_fraction == pytest.approx(3 / 8)
