"""One profile and one plan for all tests of the command line, made by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import succeeds


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """The cluster file of "local" is not the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def profile_file(tmp_path_factory) -> Path:
    """`dapple profile` of a small perceptron."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    options = ("--devices", 1, "--batch-sizes", "1,2", "--rounds", 2)
    shown = succeeds("profile", "mlp", "--args", '{"width": 16}', *options, "-o", path)
    assert str(path) in shown
    assert "layers.10" in shown
    return path


@pytest.fixture(scope="session")
def plan_file(profile_file, tmp_path_factory) -> Path:
    """A plan for it with two stages."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    options = ("--cluster", "config-a:1x2", "--global-batch-size", 8, "--micro-batch-size", 2)
    shown = succeeds(
        "plan", "--profile", profile_file, *options, "--planner", "straight", "-o", path
    )
    assert str(path) in shown
    assert "rank  1 stage 1" in shown
    return path
