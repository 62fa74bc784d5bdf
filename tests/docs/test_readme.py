"""The README is true: its files and commands work in the order in which they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks

README = "README.md"


def run(line: str, folder: Path) -> str:
    """A line of a console block, in this interpreter's environment."""
    scripts = os.path.dirname(sys.executable)
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        shlex.split(line), cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.timeout(400)
def test_the_readmes_files_and_commands_work(tmp_path):
    """From a model of one's own to its weights, in Python and on the command line."""
    import torch

    commands = []
    for mark, text in blocks(README):
        if mark.startswith("file "):
            (tmp_path / mark.removeprefix("file ")).write_text(text)
        else:
            commands += [line.removeprefix("$ ") for line in text.splitlines()]
    # Each `dapple train` finds its job file, which stands below the commands.
    outputs = {line: run(line, tmp_path) for line in commands}
    (trained,) = [text for line, text in outputs.items() if line.startswith("torchrun")]
    assert sorted(re.findall(r"rank (\d): loss", trained)) == ["0", "1"]
    weights = torch.load(tmp_path / "weights.pt")
    assert "0.0.weight" in weights
    assert {"step.json", "plan.json", "profile.json"} <= {f.name for f in tmp_path.iterdir()}
    assert (tmp_path / "runs" / "own" / "metrics.jsonl").exists()


def test_every_verb_is_shown_and_explained():
    """A line that runs, and a row of the table."""
    from dapple.cli.main import app

    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    text = (ROOT / README).read_text("utf-8")
    shown = {
        line.split()[1]
        for _, block in blocks(README)
        for line in re.findall(r"^\$ (dapple .*)$", block, re.MULTILINE)
    }
    assert shown == verbs
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == verbs


@pytest.mark.parametrize(
    "document", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(document: str):
    """Files that exist, and headings within them."""
    text = (ROOT / document).read_text("utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in {h.lower().replace(" ", "-") for h in headings}, target
