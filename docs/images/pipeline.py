"""Draws docs/images/pipeline.svg: the plan of a run and its simulated step, as the terminal shows them.

make demo
.venv/bin/python docs/images/pipeline.py runs/demo
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

import dapple
from dapple.reporting import pipeline_drawing, plan_table

WIDTH = 112
TARGET = Path(__file__).with_suffix(".svg")


def picture(folder: Path) -> str:
    """The SVG of a run's plan.json on its profile.json."""
    plan = dapple.load_record(dapple.Plan, folder / "plan.json")
    profile = dapple.load_record(dapple.ModelProfile, folder / "profile.json")
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(plan_table(plan))
    console.print()
    console.print(pipeline_drawing(dapple.simulate(plan, profile), width=WIDTH))
    title = f"{plan.model} on {plan.num_devices} devices"
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="dapple")
    # Fonts of the reader's machine: a picture that fetches some from elsewhere shows none offline.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    TARGET.write_text(picture(Path(sys.argv[1])), encoding="utf-8")
