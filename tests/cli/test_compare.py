"""`dapple compare`: a table for people, JSON for scripts."""

from __future__ import annotations

import json

import pytest

from dapple.planner import PLANNERS
from tests.cli.command import refuses, succeeds

OPTIONS = ("--cluster", "config-a:1x2", "--global-batch-size", 8)


def test_the_table_has_every_planner_and_a_ratio_to_ours(profile_file):
    """Steps ascend; dapple's own ratio is 1."""
    shown = succeeds("compare", "--profile", profile_file, *OPTIONS)
    lines = [line.split() for line in shown.splitlines()]
    names = [line[0] for line in lines if line and line[0] in {*PLANNERS, "dp-no-overlap"}]
    assert set(names) == {*PLANNERS, "dp-no-overlap"}
    (own,) = [line for line in lines if line[:1] == ["dapple"]]
    assert "1.000" in own
    assert "network shared" in shown


def test_json_has_the_same_figures_and_the_plans(profile_file):
    """One object per planner, in the order of the table."""
    text = succeeds("compare", "--profile", profile_file, *OPTIONS, "--json")
    result = json.loads(text)
    assert result["global_batch_size"] == 8
    assert result["cluster"] == "config-a:1x2"
    steps = [row["step_seconds"] for row in result["planners"]]
    assert steps == sorted(steps)
    rows = {row["planner"]: row for row in result["planners"]}
    assert rows["dapple"]["ratio"] == 1
    assert rows["gpipe"]["schedule"] == "gpipe"
    assert [stage["devices"] for stage in rows["dp"]["stages"]] == [[0, 1]]
    assert rows["dp"]["peak_bytes"] > 0
    for row in rows.values():
        assert row["samples_per_second"] == pytest.approx(8 / row["step_seconds"])


def test_refused_planners_say_why(profile_file):
    """In the table's caption, and as JSON."""
    options = (*OPTIONS, "--memory", "28 KiB")
    shown = succeeds("compare", "--profile", profile_file, *options)
    assert "dp refused: needs" in " ".join(shown.split())
    rows = json.loads(succeeds("compare", "--profile", profile_file, *options, "--json"))
    (dp,) = [row for row in rows["planners"] if row["planner"] == "dp"]
    assert dp["refused"].startswith("no plan fits")
    assert "step_seconds" not in dp


def test_micro_batch_size_and_network_model_hold_for_all(profile_file):
    """Every planner gets the same input."""
    options = (*OPTIONS, "--micro-batch-size", 2, "--network-model", "paper", "--json")
    result = json.loads(succeeds("compare", "--profile", profile_file, *options))
    assert result["network_model"] == "paper"
    assert {row["num_micro_batches"] for row in result["planners"]} == {4}


def test_wrong_input_is_refused_in_one_line(profile_file):
    """As with every verb."""
    options = ("--cluster", "config-z", "--global-batch-size", 8)
    assert "config-z" in refuses("compare", "--profile", profile_file, *options)
    options = ("--cluster", "config-a:1x2", "--global-batch-size", 0)
    assert "global batch size 0" in refuses("compare", "--profile", profile_file, *options)
