"""The page: its parts in order, and the list of clusters and network models they share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.paper import (
    acr,
    errata,
    examples,
    figures,
    gpipe_measured,
    gpipe_simulated,
    hybrid,
    planners,
    plans,
    policies,
    reference,
    scaling,
)
from benchmarks.paper.markdown import join, paragraph
from benchmarks.paper.questions import Answers, Question


class Part(Protocol):
    """A section of the page and what must be computed for it."""

    def questions(self) -> Iterable[Question[Any]]:
        """What it needs."""

    def section(self, answers: Answers) -> str:
        """Its Markdown."""


PARTS: tuple[Part, ...] = (
    plans,
    reference,
    acr,
    policies,
    figures,
    gpipe_simulated,
    gpipe_measured,
    planners,
    hybrid,
    scaling,
    examples,
    errata,
)


def write_page(page: Path, answers: Answers) -> None:
    """Write the page."""
    text = join(_head(), *(part.section(answers) for part in PARTS))
    page.write_text(text + "\n", encoding="utf-8")


def _head() -> str:
    return join(
        "# The paper beside ours",
        paragraph(
            """Each figure of DAPPLE (PPoPP 2021) that we could recompute, beside ours. Written by
            `python -m benchmarks.paper`. Each section says how ours came about: *formula*, *simulated*
            (our simulator, [semantics.md](semantics.md)) or *really run* (processes on a machine). Nothing
            here was measured on the paper's machines. Parameters and memory of the models are in
            [zoo.md](zoo.md), the paper's pictures of schedules in [schedules.md](schedules.md)."""
        ),
        paragraph(
            """Clusters, 16 V100 of 16 GB: A is 2 machines of 8 with NVLink inside and 25 Gbit/s
            between, B 16 machines of one with 25 Gbit/s, C 16 of one with 10 Gbit/s. Network model
            `paper` gives every flow a bandwidth of its own, as the authors' planner does; `shared`,
            our default, lets the flows of a machine share its card and knows latency
            ([presets.md](presets.md))."""
        ),
    )
