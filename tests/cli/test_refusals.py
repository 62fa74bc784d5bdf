"""Bad input to `plan` and `simulate`: one clear line, exit code 2, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dapple.cluster import load_cluster
from tests.cli.command import refuses, succeeds

CLUSTER = ("--cluster", "config-a:1x2")
BATCH = ("--global-batch-size", 8)
TEXT_PROFILE = (
    "node1 -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, "
    "activation_size=8.0, parameter_size=4.0\n"
)
TOML = load_cluster("config-a:1x2").to_toml()


def changed(path: Path, change: Callable[[Any], object], tmp_path: Path) -> Path:
    """A copy of a JSON file with a change."""
    data = json.loads(path.read_text())
    change(data)
    copy = tmp_path / "changed.json"
    copy.write_text(json.dumps(data))
    return copy


def written(text: str | bytes, path: Path) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist"),
        ("FOLDER", "Is a directory"),
        ("", "is not JSON"),
        ("hello {", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (b"\xff\xfe\x00", "not a text file"),
        ("[]", "dictionary"),
        ("null", "dictionary"),
        ("3", "dictionary"),
        ("{}", "model: Field required"),
        (TEXT_PROFILE, "pass --profile-batch-size"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_a_profile_that_cannot_be_read_is_named(verb: str, text, words: str, plan_file, tmp_path):
    """Missing, a folder, no JSON, another shape."""
    path = tmp_path / "profile.json"
    if text == "FOLDER":
        path.mkdir()
    elif text is not None:
        written(text, path)
    arguments = (plan_file,) if verb == "simulate" else (*CLUSTER, *BATCH)
    line = refuses(verb, *arguments, "--profile", path)
    assert words in line
    assert str(path) in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.update(format="dapple-plan"), "format: Input should be 'dapple-profile'"),
        (lambda p: p.update(version=2), "version: Input should be 1"),
        (lambda p: p.update(colour="red"), "colour: Extra inputs are not permitted (got 'red')"),
        (lambda p: p.update(batch_sizes=[1, 2, 4]), "2 values for 3 batch sizes"),
        (lambda p: p.update(batch_sizes=[2, 1]), "must ascend"),
        (lambda p: p["layers"][0].update(forward_seconds=[-1, 1]), "layers.0.forward_seconds.0"),
        (lambda p: p["layers"][0].update(saved_bytes=[float("nan"), 1]), "layers.0.saved_bytes.0"),
        (lambda p: p["layers"][0].update(parameter_bytes="much"), "layers.0.parameter_bytes"),
        (lambda p: p["layers"][0].update(parameter_bytes=10**40), "less than or equal"),
        (lambda p: p["tensors"][0].update(bytes_per_sample=1e308), "tensors.0.bytes_per_sample"),
        (lambda p: p["tensors"][0].update(consumers=[99]), "must be layers after its producer"),
        (lambda p: p.pop("layers"), "layers: Field required"),
    ],
)
def test_a_profile_that_breaks_the_format_is_refused(change, words: str, profile_file, tmp_path):
    """The line names field, value and what was expected."""
    path = changed(profile_file, change, tmp_path)
    assert words in refuses("plan", "--profile", path, *CLUSTER, *BATCH)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config-z", "presets: local"),
        ("", "presets: local"),
        ("CONFIG-A", "presets: local"),
        ("config-a:0x8", "write counts as MACHINESxDEVICES, such as config-a:4x8"),
        ("config-a:4", "write counts as MACHINESxDEVICES"),
        ("config-a:", "write counts as MACHINESxDEVICES"),
        ("config-a:4x8x2", "write counts as MACHINESxDEVICES"),
        ("config-a:99999x99999", "9999800001 devices; at most 4096"),
        ("local:", "such as local:2"),
        ("local:0", "such as local:2"),
        ("local:two", "such as local:2"),
        ("none.toml", "none.toml does not exist"),
        ("./", "Is a directory"),
    ],
)
def test_a_cluster_that_does_not_exist_is_refused(name: str, words: str, profile_file):
    """With the presets, or with how counts are written."""
    arguments = ("plan", "--profile", profile_file, "--cluster", name, *BATCH)
    assert words in refuses(*arguments)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory = 17179869184", 'memory = "40 parsecs"', '"40 parsecs" has no known unit'),
        ("memory = 17179869184", "memory = 0", "machines.0.kind.memory"),
        ("memory = 17179869184", "memory = nan", "machines.0.kind.memory"),
        ("memory = 17179869184", f"memory = {10**400}", "too large"),
        ("speed = 1.0", "speed = 1e-310", "machines.0.kind.speed"),
        ("latency = 5e-06", "latency = 1e300", "machines.0.inside.latency"),
        ("latency = 5e-06", 'latency = "soon"', 'write it like "30 us"'),
        ("bandwidth = 40000000000.0", 'bandwidth = "-1 GB/s"', 'write it like "25 Gbit/s"'),
        ("devices = 2", "devices = 0", "machines.0.devices"),
        ("devices = 2", "devices = 100000", "100000 devices; at most 4096"),
        ("count = 1", "count = 1\ncolour = 3", "colour"),
        ('"dapple-cluster"', '"dapple-plan"', "Input should be 'dapple-cluster'"),
        ('"shared"', '"fast"', "Input should be 'shared' or 'paper'"),
        ("[[machines]]", "[[machines", "is not TOML"),
    ],
)
def test_a_cluster_file_with_a_fault_is_refused(old, new, words: str, profile_file, tmp_path):
    """Field, value, and how quantities are written."""
    assert old in TOML
    path = written(TOML.replace(old, new), tmp_path / "lab.toml")
    line = refuses("plan", "--profile", profile_file, "--cluster", path, *BATCH)
    assert words in line
    assert "lab.toml" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--global-batch-size", "0"), "global batch size 0 must be at least 1"),
        (("--global-batch-size", "-3"), "global batch size -3 must be at least 1"),
        (("--global-batch-size", "x"), "'--global-batch-size'"),
        (("--global-batch-size", "1.5"), "'--global-batch-size'"),
        (("--global-batch-size", "9" * 24), "is too large; use at most 1048576"),
        (("--micro-batch-size", "0"), "micro-batch size 0"),
        (("--micro-batch-size", "9"), "between 1 and the global batch size 8"),
        (("--planner", "best"), 'planner "best" is unknown; known: dapple, dp, straight, even'),
        (("--schedule", "x"), 'schedule "x" is unknown; known: early-backward, gpipe'),
        (("--network-model", "x"), 'network model "x" is unknown; known: shared, paper'),
        (("--optimizer", "x"), 'optimizer "x" is unknown; known: adamw'),
        (("--memory", "much"), 'write it like "16 GiB"'),
        (("--memory", "-5 GiB"), 'write it like "16 GiB"'),
        (("--memory", "1 KiB"), "no plan fits the devices' memory; the closest"),
        (("--memory", "0"), "no plan fits the devices' memory; the closest"),
        (("--profile-batch-size", "4"), "leave out --profile-batch-size"),
        (("--colour", "red"), "No such option: --colour"),
        (("surplus",), "unexpected extra argument"),
    ],
)
def test_an_option_of_plan_that_makes_no_sense_is_refused(options, words: str, profile_file):
    """Each with its value and what can be passed instead."""
    arguments = ("plan", "--profile", profile_file, *CLUSTER, *BATCH)
    assert words in refuses(*arguments, *options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--global-batch-size", "0"), "global batch size 0 must be at least 1"),
        (("--global-batch-size", "9" * 24), "is too large; use at most 1048576"),
        (("--micro-batch-size", "9"), "between 1 and the global batch size 8"),
        (("--network-model", "x"), 'network model "x" is unknown'),
        (("--optimizer", "x"), 'optimizer "x" is unknown'),
        (("--memory", "much"), 'write it like "16 GiB"'),
        (("--cluster", "config-z"), "presets: local"),
    ],
)
def test_an_option_of_compare_that_makes_no_sense_is_refused(options, words: str, profile_file):
    """The same wording as in `plan`."""
    arguments = ("compare", "--profile", profile_file, *CLUSTER, *BATCH)
    assert words in refuses(*arguments, *options)


@pytest.mark.parametrize("size", ["0", "-1"])
def test_a_text_profile_needs_a_batch_size_of_at_least_one(size: str, tmp_path):
    """The remedy says where to find it."""
    path = written(TEXT_PROFILE, tmp_path / "graph.txt")
    arguments = ("plan", "--profile", path, *CLUSTER, *BATCH)
    assert "at least 1" in refuses(*arguments, "--profile-batch-size", size)


@pytest.mark.parametrize("missing", ["--cluster", "--global-batch-size"])
def test_an_option_that_is_missing_is_named(missing: str, profile_file):
    """And the line says where help is."""
    options = {"--profile": profile_file, "--cluster": "config-a", "--global-batch-size": 8}
    del options[missing]
    line = refuses("plan", *(part for pair in options.items() for part in pair))
    assert f"Missing option '{missing}'" in line
    assert "`dapple plan --help`" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "pass either --profile FILE or --model NAME"),
        (("--model", "vgg-19", "--profile", "p.json"), "pass either --profile FILE or --model"),
        (("--profile", "p.json", "--device", "h100"), "--device goes with --model"),
        (("--model", "vgg-19", "--device", "h1000"), 'device "h1000" is unknown'),
        (("--model", "vgg-19", "--args", "{"), "is not JSON"),
    ],
)
def test_costs_come_from_a_profile_or_from_a_model(options, words: str):
    """One of them, and a device that is known."""
    assert words in refuses("plan", *options, *CLUSTER, *BATCH)


def test_an_unknown_verb_is_refused():
    """One line as well."""
    assert "No such command 'frobnicate'" in refuses("frobnicate")


@pytest.mark.parametrize("where", ["folder", "file/below.json", "/dev/null"])
def test_an_output_that_cannot_be_written_is_refused(where, profile_file, plan_file, tmp_path):
    """Before the work, and before anything is printed."""
    (tmp_path / "folder").mkdir()
    written("", tmp_path / "file")
    path = tmp_path / where
    line = refuses("plan", "--profile", profile_file, *CLUSTER, *BATCH, "-o", path)
    assert f"cannot write {path}" in line
    assert "cannot write" in refuses("profile", "mlp", "-o", path)
    line = refuses("simulate", plan_file, "--profile", profile_file, "--trace", path)
    assert f"cannot write {path}" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.update(format="dapple-profile"), "Input should be 'dapple-plan'"),
        (lambda p: p.update(micro_batch_size=3), "must be ceil(global_batch_size"),
        (lambda p: p.update(virtual=2), "give every device as many"),
        (lambda p: p.update(network_model="x"), "Input should be 'shared' or 'paper'"),
        (lambda p: p.update(schedule="x"), 'schedule "x" is unknown'),
        (lambda p: p["stages"].pop(), "the plan covers"),
        (lambda p: p.update(stages=[]), "stages"),
        (lambda p: p["stages"][1].update(start=5), "stages must be adjacent"),
        (lambda p: p["stages"][1].update(devices=[0]), "uses devices [0] twice"),
        (lambda p: p["stages"][1].update(devices=[7]), "not in the cluster, which has 2"),
        (lambda p: p["stages"][0].update(warmup=0), "stages.0.warmup"),
        (lambda p: [s.update(warmup=1 + i) for i, s in enumerate(p["stages"])], "deadlock"),
        (
            lambda p: p["stages"][0].update(shard="fsdp"),
            '"fsdp" is not shared out among replicas yet',
        ),
        (lambda p: p["stages"][0].update(rows=[0]), "cannot be shares of replicas"),
        (lambda p: p["stages"][0].update(rows=[1e308]), "stages.0.rows.0"),
        (lambda p: p.update(optimizer_state_factor=1e308), "optimizer_state_factor"),
        (lambda p: p["stages"][0].update(recompute=[[5, 9]]), "half-open ranges within the stage"),
        (
            lambda p: p.update(
                global_batch_size=10**7, num_micro_batches=10**7, micro_batch_size=1
            ),
            "less than or equal to 65536",
        ),
    ],
)
def test_a_plan_with_a_fault_is_refused(change, words: str, plan_file, profile_file, tmp_path):
    """Edited by hand, or made by another program."""
    path = changed(plan_file, change, tmp_path)
    assert words in refuses("simulate", path, "--profile", profile_file)


def test_a_plan_for_another_model_is_refused(plan_file, profile_file, tmp_path):
    """Another number of layers."""

    def shorten(profile: Any) -> None:
        profile["layers"].pop()
        profile["tensors"] = []

    path = changed(profile_file, shorten, tmp_path)
    line = refuses("simulate", plan_file, "--profile", path)
    assert "covers 6 layers but the profile has 5" in line


def test_a_profile_in_place_of_a_plan_is_refused(profile_file):
    """And the other way round."""
    line = refuses("simulate", profile_file, "--profile", profile_file)
    assert "Input should be 'dapple-plan'" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--schedule", "x"), 'schedule "x" is unknown'),
        (("--network-model", "x"), 'network model "x" is unknown'),
        (("--cluster", "config-a:1x1"), "the plan uses device 1 but the cluster has 1"),
        (("--cluster", "config-z"), "presets: local"),
        (("--picture", "step.gif"), "end its name in .svg, .png, .pdf"),
        (("--measured", "no.json"), "no.json"),
    ],
)
def test_an_option_of_simulate_that_makes_no_sense_is_refused(
    options, words: str, plan_file, profile_file
):
    """The same wording as in `plan`."""
    assert words in refuses("simulate", plan_file, "--profile", profile_file, *options)


@pytest.mark.parametrize("name", ["[bold]model[/red]", "two\nlines", "ünï", ""])
def test_any_model_name_can_be_printed(name: str, profile_file, tmp_path):
    """Names are printed as they are, whatever a terminal would make of them."""
    path = changed(profile_file, lambda p: p.update(model=name), tmp_path)
    assert name.split("\n")[0] in succeeds("plan", "--profile", path, *CLUSTER, *BATCH)
