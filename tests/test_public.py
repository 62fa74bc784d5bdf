"""The public surface: exactly these names, loaded when they are first used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import dapple

NAMES = {
    "Cluster",
    "DappleError",
    "LayerGraph",
    "ModelProfile",
    "Plan",
    "PlanSampler",
    "Timeline",
    "Trainer",
    "Workload",
    "__version__",
    "capture",
    "load_cluster",
    "load_record",
    "plan",
    "profile",
    "simulate",
}


def imported_by(code: str) -> set[str]:
    """The packages that are loaded after some code, in a process of its own."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_exported_names_are_the_documented_ones():
    """In `__all__`, in `dir`, and as attributes."""
    assert set(dapple.__all__) == NAMES
    assert len(dapple.__all__) == len(NAMES)
    assert dir(dapple) == sorted(NAMES)
    assert all(getattr(dapple, name) is not None for name in NAMES)


def test_a_name_that_is_not_exported_is_an_attribute_error():
    """As in any module."""
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = dapple.train


def test_the_verbs_are_functions():
    """And not packages of the same name."""
    assert all(callable(getattr(dapple, verb)) for verb in ("profile", "plan", "simulate"))


def test_importing_dapple_loads_neither_torch_nor_pydantic():
    """So that everything that only needs a name starts fast."""
    assert not {"torch", "pydantic", "numpy", "rich", "typer"} & imported_by("import dapple")


@pytest.mark.parametrize(
    "name", ["Cluster", "Plan", "ModelProfile", "load_cluster", "load_record", "plan", "simulate"]
)
def test_planning_and_simulating_do_not_load_torch(name: str):
    """Each name on its own."""
    assert "torch" not in imported_by(f"import dapple\ndapple.{name}")


def test_starting_a_run_needs_neither_torch_nor_its_compiler():
    """`dapple.runtime` loads a name when it is used; what starts and watches ranks stays light."""
    assert "torch" not in imported_by("import dapple.runtime.launch")
    with pytest.raises(AttributeError, match="no attribute 'Launcher'"):
        _ = importlib.import_module("dapple.runtime").Launcher
    assert all(getattr(dapple.runtime, name) is not None for name in dapple.runtime.__all__)
