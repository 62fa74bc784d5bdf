"""Writes docs/paper.md: every number of the paper beside ours.

    python -m benchmarks.paper [PAGE]

By default docs/paper.md, with its plots in docs/images. Two processes; under ten minutes. Without
torch, but for what `python -m benchmarks.paper.gpipe` has measured before, which is copied in.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.paper.figures import draw_all
from benchmarks.paper.page import PARTS, write_page
from benchmarks.paper.plots import draw
from benchmarks.paper.questions import answer_all


def main(page: Path) -> None:
    """Compute and write."""
    begun = time.perf_counter()
    answers = answer_all(question for part in PARTS for question in part.questions())
    write_page(page, answers)
    draw(answers, page.parent / "images")
    draw_all(page.parent / "images")
    print(f"{page} in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    default = Path(__file__).parents[2] / "docs" / "paper.md"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
