"""Each verb does its work, and its results are files and JSON that can be read again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dapple.cluster import load_cluster
from dapple.records import ModelProfile, Plan, Timeline, load_record
from dapple.records.base import validate_record
from tests.cli.command import refuses, succeeds

JOB = """
name = "tiny"
folder = "{folder}"
[model]
factory = "tests.cli.user_model:workload"
[data]
factory = "tests.cli.user_model:batches"
[cluster]
devices = 2
{cluster}
[plan]
profile_batch_sizes = [1, 2]
{plan}
[optimizer]
name = "sgd"
arguments = {{ lr = 0.1 }}
[training]
steps = 4
global_batch_size = 5
validate_every = 2
"""


def test_profile_writes_what_it_measured(profile_file):
    """Layers, times for each batch size, and who measured."""
    profile = load_record(ModelProfile, profile_file)
    assert profile.model == "mlp"
    assert profile.source == "measured"
    assert profile.batch_sizes == (1, 2)
    assert profile.num_layers == 6
    assert all(layer.saved_bytes is not None for layer in profile.layers)


def test_profile_keeps_this_machine_as_the_cluster_local(profile_file, tmp_path):
    """What `--cluster local:1` then means, without another measurement."""
    plan = tmp_path / "plan.json"
    options = ("--cluster", "local:1", "--global-batch-size", 2)
    succeeds("plan", "--profile", profile_file, *options, "-o", plan)
    assert load_record(Plan, plan).cluster.name == "local"


def test_profile_says_what_capture_noticed(tmp_path, capfd):
    """As a note, once, and in the profile; not as a warning of Python's."""
    path = tmp_path / "noted.json"
    options = ("--device", "v100-16gb", "--batch-sizes", "2", "-o", path)
    shown = succeeds("profile", "tests.cli.user_model:checkpointed", *options)
    (note,) = load_record(ModelProfile, path).notes
    assert "checkpoint" in note
    assert " ".join(shown.split()).count(f"note: {note}") == 1
    assert "UserWarning" not in capfd.readouterr().err


def test_plan_as_json_is_the_plan_that_it_writes(profile_file, tmp_path):
    """Nothing else is printed."""
    path = tmp_path / "plan.json"
    options = ("--cluster", "config-a:1x2", "--global-batch-size", 8, "-o", path, "--json")
    shown = json.loads(succeeds("plan", "--profile", profile_file, *options))
    assert validate_record(Plan, shown, "output") == load_record(Plan, path)


@pytest.mark.parametrize("schedule", ["early-backward", "zero-bubble"])
def test_the_explanation_is_part_of_the_json(profile_file, tmp_path, schedule: str):
    """And of the plan that is written: step, what binds it, and the alternatives with their steps."""
    path = tmp_path / "plan.json"
    options = ("--cluster", "config-a:1x2", "--global-batch-size", 8, "--schedule", schedule)
    explained = ("plan", "--profile", profile_file, *options, "--explain", "--json", "-o", path)
    shown = json.loads(succeeds(*explained))["explanation"]
    plan = load_record(Plan, path)
    assert plan.explanation is not None
    assert plan.explanation.model_dump(mode="json", exclude_none=True) == shown
    assert shown["step_seconds"] == pytest.approx(plan.predicted.step_seconds)
    assert shown["binding"]
    dp = next(other for other in shown["alternatives"] if other["name"].startswith("dp"))
    assert dp["step_seconds"] >= shown["step_seconds"]


def test_plan_says_why_data_parallelism_is_refused(profile_file):
    """In bytes, where one whole replica does not fit."""
    options = ("--cluster", "config-a:1x2", "--global-batch-size", 8, "--memory", "28 KiB")
    shown = succeeds("plan", "--profile", profile_file, *options)
    assert "dp refused" in shown
    assert "of 28.0 KiB" in shown


@pytest.mark.parametrize("planner", ["dp", "straight", "even"])
def test_plan_makes_baselines_on_request(profile_file, planner: str, tmp_path):
    """The plan says which planner made it."""
    path = tmp_path / "plan.json"
    options = ("--cluster", "config-a:1x2", "--global-batch-size", 8, "--planner", planner)
    succeeds("plan", "--profile", profile_file, *options, "-o", path)
    assert load_record(Plan, path).planner == planner


def test_plan_takes_a_cluster_file(profile_file, tmp_path):
    """TOML, written here from a preset."""
    path = tmp_path / "lab.toml"
    path.write_text(load_cluster("config-b:2x1").to_toml())
    options = ("--cluster", path, "--global-batch-size", 8, "--json")
    shown = json.loads(succeeds("plan", "--profile", profile_file, *options))
    assert shown["cluster"]["name"] == "config-b:2x1"


def test_plan_reads_text_profiles(tmp_path):
    """With their batch size, which they do not say."""
    path = tmp_path / "graph.txt"
    path.write_text(
        "node1 -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, "
        "activation_size=8.0, parameter_size=4.0\n"
    )
    options = ("--cluster", "config-a:1x1", "--global-batch-size", 8, "--profile-batch-size", 4)
    assert "memory unchecked" in succeeds("plan", "--profile", path, *options)


def test_simulate_writes_a_trace_and_prints_the_timeline(plan_file, profile_file, tmp_path):
    """--json is a timeline; the trace has a process per machine and opens in Perfetto."""
    trace = tmp_path / "step.json"
    shown = json.loads(
        succeeds("simulate", plan_file, "--profile", profile_file, "--trace", trace, "--json")
    )
    timeline = validate_record(Timeline, shown, "output")
    assert timeline.source == "simulated"
    stages = load_record(Plan, plan_file).stages
    assert timeline.in_flight == tuple(stage.warmup for stage in stages)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["ph"] for e in events} >= {"M", "X", "b", "e"}


def test_simulate_draws_the_step_alone_or_above_a_run(plan_file, profile_file, tmp_path):
    """A run's timeline is drawn below it, and its shares of the step are printed beside."""
    pytest.importorskip("matplotlib")
    simulate = ("simulate", plan_file, "--profile", profile_file)
    path, run = tmp_path / "step.svg", tmp_path / "timeline.json"
    assert f"picture written to {path}" in succeeds(*simulate, "--picture", path)
    assert "rank 1 stage 1" in path.read_text("utf-8")
    timeline = json.loads(succeeds(*simulate, "--json"))
    run.write_text(json.dumps({**timeline, "source": "measured"}))
    shown = succeeds(*simulate, "--picture", path, "--measured", run)
    assert "simulated / measured" in shown
    titles = [line for line in path.read_text("utf-8").splitlines() if "mlp, " in line]
    assert ["simulated" in t for t in titles] == [True, False]
    assert ["measured run" in t for t in titles] == [False, True]


def test_schedules_go_out_to_a_file_and_come_back(plan_file, profile_file, tmp_path):
    """PyTorch's CSV of zero bubble gives zero bubble's step."""
    path = tmp_path / "own.csv"
    simulate = ("simulate", plan_file, "--profile", profile_file, "--schedule")
    first = succeeds(*simulate, "zero-bubble", "--export-schedule", path)
    assert "gradients of inputs" in first
    assert "0I0" in path.read_text()
    again = json.loads(succeeds(*simulate, path, "--json"))
    named = json.loads(succeeds(*simulate, "zero-bubble", "--json"))
    assert again == named


def test_plan_makes_virtual_stages_on_request(profile_file, tmp_path):
    """Two per device for interleaved; refused where the layers do not suffice."""
    common = ("plan", "--profile", profile_file, "--cluster", "config-a:1x2")
    common += ("--global-batch-size", 8, "--planner", "straight", "--micro-batch-size", 2)
    shown = json.loads(succeeds(*common, "--schedule", "interleaved", "--json"))
    assert (shown["virtual"], len(shown["stages"])) == (2, 4)
    assert "use fewer virtual stages" in refuses(
        *common, "--schedule", "interleaved", "--virtual", 9
    )


def test_simulate_runs_another_schedule_network_and_cluster(plan_file, profile_file):
    """GPipe holds all micro-batches; the table is that of the other run."""
    shown = json.loads(
        succeeds("simulate", plan_file, "--profile", profile_file, "--schedule", "gpipe", "--json")
    )
    assert shown["in_flight"] == [4, 4]
    options = ("--cluster", "config-c:2x1", "--network-model", "paper")
    table = succeeds("simulate", plan_file, "--profile", profile_file, *options)
    assert "simulated step" in table


def train(job: Path, *options: str) -> str:
    """`dapple train` from the project's folder, as a process of its own; its output."""
    command = [sys.executable, "-m", "dapple", "train", str(job), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_run(folder: Path, steps: int) -> None:
    """The files of a run: metrics, timeline, trace, and weights under the model's own names."""
    import torch

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, steps + 1))
    assert [r["step"] for r in rows if "validation_loss" in r] == [0, 2, 4]
    assert all(r["rows"] == 5 for r in rows if "loss" in r)
    assert load_record(Timeline, folder / "timeline.json").source == "measured"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    weights = torch.load(folder / "weights.pt")
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_train_profiles_plans_and_trains(tmp_path):
    """plan.file = "auto", by default; a run under a memory limit, then some steps without it.

    (tests/docs/test_readme.py trains with a plan file.)
    """
    job, folder = tmp_path / "job.toml", tmp_path / "run"
    text = JOB.format(folder=folder, cluster='memory = "3 KiB"', plan="")
    job.write_text(text + "steps_without_memory_limit = 2\n")
    shown = train(job)
    check_run(folder, 4)
    for words in ("profiled", "expected: step", "training loss", "predicted against measured"):
        assert words in shown
    assert load_record(ModelProfile, folder / "profile.json").concurrency == 2
    assert load_record(Plan, folder / "plan.json").model == "own"
    assert load_cluster(str(folder / "cluster.toml")).num_devices == 2
    assert (folder / "without-memory-limit" / "metrics.jsonl").exists()
