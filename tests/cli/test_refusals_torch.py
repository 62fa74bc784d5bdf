"""Bad input to `profile` and `train`: one clear line, exit code 2, before minutes of work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapple.cluster import load_cluster
from tests.cli.command import refuses

JOB = """
name = "tiny"
folder = "FOLDER"
[model]
factory = "tests.cli.user_model:workload"
arguments = { width = 8 }
[data]
factory = "tests.cli.user_model:batches"
[cluster]
name = "local"
devices = 2
[plan]
file = "auto"
[optimizer]
name = "sgd"
arguments = { lr = 0.1 }
[training]
steps = 2
global_batch_size = 4
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nope",), 'model "nope" is not in the zoo; known: gpt, mlp, skipnet'),
        (("",), "is not in the zoo"),
        (("mlp", "--args", '{"wide": 3}'), 'model "mlp" has no argument "wide"; it has: inputs'),
        (("mlp", "--args", '{"width": "x"}'), "cannot be built with {'width': 'x'}"),
        (("mlp", "--args", '{"width": -1}'), "cannot be built with {'width': -1}"),
        (("skipnet", "--args", '{"layers": 4}'), "layers 4 is not a positive multiple of 3"),
        (("mlp", "--args", "{width: 3}"), "is not JSON"),
        (("mlp", "--args", "[1]"), "is no JSON object; write it like"),
        (("no_such_module:f",), "No module named 'no_such_module'"),
        (("tests.cli.user_model:nothing",), 'has no function "nothing"'),
        (("tests.cli.user_model:not_a_function",), 'has no function "not_a_function"'),
        (("tests.cli.user_model:workload", "--args", '{"deep": 3}'), "argument 'deep'"),
        (("tests.cli.user_model:",), 'write it like "my_module:function"'),
        ((":f",), 'write it like "my_module:function"'),
        (("mlp", "--batch-sizes", "2,1"), "must be ascending whole numbers from 1"),
        (("mlp", "--batch-sizes", "0,1"), "must be ascending whole numbers from 1"),
        (("mlp", "--batch-sizes", "one"), "must be ascending whole numbers from 1"),
        (("mlp", "--batch-sizes", ""), "must be ascending whole numbers from 1"),
        (("mlp", "--batch-sizes", "9999999999"), "is too large"),
        (("mlp", "--rounds", "0"), "measure at least 1 pass"),
        (("mlp", "--precision", "fp8"), 'precision "fp8" is unknown; known: float32, bf16, fp16'),
        (("mlp", "--precision", "bf16", "--device", "v100-16gb"), "goes with --device cpu"),
        (("mlp", "--devices", "0"), "measure with 1 to"),
        (("mlp", "--devices", "99999"), "measure with 1 to"),
        (("mlp", "--device", "v100"), 'device "v100" is unknown; known: v100-16gb'),
        (("mlp", "--devices", "two"), "'--devices'"),
    ],
)
def test_what_profile_cannot_measure_is_refused(arguments, words: str, tmp_path):
    """Without starting a process."""
    assert words in refuses("profile", *arguments, "-o", tmp_path / "profile.json")


def test_profile_needs_a_model_and_an_output(tmp_path):
    """Named as the help names them."""
    assert "Missing argument 'model'" in refuses("profile", "-o", tmp_path / "profile.json")
    assert "Missing option '--output'" in refuses("profile", "mlp")


def test_a_function_that_makes_no_workload_is_refused(tmp_path):
    """It says what it returned instead."""
    line = refuses("profile", "tests.cli.user_model:a_number", "-o", tmp_path / "profile.json")
    assert "returned int; it must return a dapple.Workload" in line


def test_an_error_in_the_users_own_code_is_placed(tmp_path):
    """File, line and function, where a measuring process failed; not an input error: exit code 1."""
    arguments = ("profile", "tests.cli.user_model:fails_inside", "-o", tmp_path / "profile.json")
    line = refuses(*arguments, code=1)
    assert "TypeError: no such encoder" in line
    assert "user_model.py" in line
    assert "in fails_inside" in line


def plan_for(devices: int, model: str = "own") -> str:
    """A plan with one stage on so many devices."""
    plan = {
        "model": model,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "num_micro_batches": 1,
        "stages": [{"start": 0, "stop": 2, "devices": list(range(devices))}],
        "cluster": load_cluster(f"config-a:1x{devices}").model_dump(mode="json"),
    }
    return json.dumps(plan)


def refused_job(text: str, tmp_path: Path, *options: object) -> str:
    path = tmp_path / "job.toml"
    path.write_text(text.replace("FOLDER", str(tmp_path / "run")))
    return refuses("train", path, *options)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[training]", "[schooling]", "training: Field required"),
        ('name = "tiny"', "", "name: Field required"),
        ('name = "tiny"', "= 3", "is not TOML"),
        ("steps = 2", "steps = 0", "training.steps"),
        ("steps = 2", 'steps = "many"', "training.steps"),
        ("steps = 2", "steps = 2\ncolour = 3", "training.colour"),
        ("global_batch_size = 4", "global_batch_size = 0", "training.global_batch_size"),
        ("devices = 2", "devices = 0", "cluster.devices"),
        ("devices = 2", 'memory = "much"', 'write it like "16 GiB"'),
        ("devices = 2", 'memory = "0 B"', "cluster.memory"),
        ("devices = 2", 'memory = "1e308 TiB"', "cluster.memory"),
        ("devices = 2", "memory = true", "cluster.memory"),
        ('name = "local"', 'name = "config-z"', "presets: local"),
        (
            'name = "local"',
            'name = "config-a"',
            "cluster config-a has 16 devices, but the job has 2",
        ),
        ('name = "local"', 'name = "none.toml"', "none.toml does not exist"),
        ('file = "auto"', 'file = "none.json"', "none.json does not exist"),
        ('file = "auto"', 'planner = "best"', "unknown planner; known: dapple, dp, straight, even"),
        ('file = "auto"', 'schedule = "x"', "unknown schedule; known: early-backward, gpipe"),
        ('file = "auto"', "profile_batch_sizes = [2, 1]", "must ascend"),
        ('file = "auto"', "profile_batch_sizes = []", "must ascend"),
        ('file = "auto"', "micro_batch_size = 0", "plan.micro_batch_size"),
        ('name = "sgd"', 'name = "lion"', "optimizer.name: unknown optimizer; known: adamw, adam"),
        ('name = "sgd"', 'name = "LBFGS"', "optimizer.name: unknown optimizer"),
        ('name = "sgd"', 'name = "no_such_module:f"', "No module named 'no_such_module'"),
        ('name = "sgd"', 'name = "tests.cli.user_model:no_optimizer"', "factory returned int"),
        ("lr = 0.1 }", 'lr = 0.1 }\ngroups = { "*.bias" = 3 }', "optimizer.groups.*.bias"),
        (
            "lr = 0.1 }",
            'lr = 0.1 }\ngroups = { "*.bias" = { decay = 0.0 } }',
            'optimizer.groups: SGD has no option "decay", given for "*.bias"; it has: lr, momentum',
        ),
        ("[training]", '[scheduler]\nname = ""\n[training]', "scheduler.name"),
        ("[training]", "[scheduler]\n[training]", "scheduler.name: Field required"),
        ("[training]", '[scheduler]\nname = "Up"\n[training]', 'has no class "Up"; write one of'),
        ("[training]", '[scheduler]\nname = "Counter"\n[training]', 'has no class "Counter"'),
        (
            "[training]",
            '[scheduler]\nname = "StepLR"\n[training]',
            'scheduler "StepLR" refuses {}',
        ),
        (
            "[training]",
            '[scheduler]\nname = "ReduceLROnPlateau"\n[training]',
            "ReduceLROnPlateau wants a metric",
        ),
        (
            "[training]",
            '[scheduler]\nname = "tests.cli.user_model:none"\n[training]',
            'no function "none"',
        ),
        ("[training]", '[metrics]\nloss = "a:b"\n[training]', 'metrics: "loss" is the loss itself'),
        ("[training]", '[metrics]\nhits = "hits"\n[training]', "metrics.hits: write it like"),
        (
            "[training]",
            '[metrics]\nhits = "tests.cli.user_model:none"\n[training]',
            'no function "none"',
        ),
        ("width = 8 }", 'width = 8 }\nloss = "mse"', "model.loss: write it like"),
        ("width = 8 }", 'width = 8 }\nloss = "tests.cli.user_model:none"', 'no function "none"'),
        ("width = 8 }", 'width = 8 }\nweight = "tests.cli.user_model:none"', 'no function "none"'),
        ("steps = 2", 'steps = 2\nprecision = "fp8"', "training.precision: Input should be"),
        ("steps = 2", "steps = 2\nclip_norm = 0", "training.clip_norm"),
        ("steps = 2", "steps = 2\nclip_norm = nan", "training.clip_norm"),
        ("steps = 2", "steps = 2\nnorm_type = -1", "training.norm_type"),
        ("lr = 0.1", "rate = 0.1", 'optimizer "sgd" refuses'),
        ("lr = 0.1", "lr = -1.0", "Invalid learning rate"),
        ("width = 8", "depth = 8", "unexpected keyword argument 'depth'"),
        ("user_model:workload", "user_model:nothing", 'has no function "nothing"'),
        ("tests.cli.user_model:workload", "nope", 'model "nope" is not in the zoo'),
        ("tests.cli.user_model:batches", "no_such_module:f", "No module named 'no_such_module'"),
        ("tests.cli.user_model:batches", "batches", 'write it like "my_module:function"'),
        ("user_model:batches", "user_model:nothing", 'has no function "nothing"'),
        ('batches"', 'batches"\narguments = { x = 1 }', "unexpected keyword argument 'x'"),
        ("user_model:batches", "user_model:no_batches", "it has no batches"),
        ("user_model:batches", "user_model:no_pairs", "return pairs of (inputs, targets)"),
        ("user_model:batches", "user_model:no_iterator", "not iterable"),
        ("user_model:batches", "user_model:no_validation", "OSError: corpus.valid is missing"),
    ],
)
def test_a_job_with_a_fault_is_refused(old: str, new: str, words: str, tmp_path):
    """Without profiling anything and without starting a rank."""
    assert old in JOB
    assert words in refused_job(JOB.replace(old, new), tmp_path)


def test_a_job_file_that_cannot_be_read_is_refused(tmp_path):
    """Missing, or a folder."""
    assert "does not exist" in refuses("train", tmp_path / "none.toml")
    assert "Is a directory" in refuses("train", tmp_path)


@pytest.mark.parametrize("steps", ["0", "-1", "x"])
def test_steps_on_the_command_line_are_checked(steps: str, tmp_path):
    """At least one."""
    assert "--steps" in refused_job(JOB, tmp_path, "--steps", steps)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    """Such as one below a file."""
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused_job(JOB, tmp_path, "--output", tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["weights.pt", "timeline.json", "trace.json"])
def test_a_result_that_cannot_be_written_is_refused_before_the_run(name: str, tmp_path):
    """Also those of its end, hours later."""
    (tmp_path / "run" / name).mkdir(parents=True)
    assert f"{name}: it is a folder; choose another path" in refused_job(JOB, tmp_path)


def test_a_plan_for_more_devices_than_the_job_has_is_refused(tmp_path):
    """From the job or from the command line; with all remedies."""
    path = tmp_path / "plan.json"
    path.write_text(plan_for(3))
    for line in (
        refused_job(JOB, tmp_path, "--plan", path),
        refused_job(JOB.replace('"auto"', f'"{path}"'), tmp_path),
    ):
        assert "the plan uses 3 devices, but the job has 2; set devices = 3" in line


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schedule": "foo"}, 'schedule "foo" is unknown'),
        ({"schedule": "none.csv"}, "none.csv does not exist"),
        ({"virtual": 2}, "virtual is 2"),
    ],
)
def test_a_plan_whose_schedule_cannot_run_is_refused_before_processes_start(tmp_path, change, told):
    """In one line, not one for each rank."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(plan_for(2)) | change))
    assert told in refused_job(JOB, tmp_path, "--plan", path)


def test_under_torchrun_a_plan_file_is_needed(tmp_path, monkeypatch):
    """Ranks do not plan: each could come to another plan."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    assert "under torchrun all ranks need one plan file" in refused_job(JOB, tmp_path)
