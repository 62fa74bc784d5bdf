"""Pieces of a page in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100


def paragraph(text: str) -> str:
    """Text in lines of a readable width."""
    return textwrap.fill(
        " ".join(text.split()), WIDTH, break_on_hyphens=False, break_long_words=False
    )


def bullets(items: Iterable[str]) -> str:
    """A list."""
    return "\n".join(
        textwrap.fill(
            " ".join(item.split()),
            WIDTH,
            initial_indent="- ",
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for item in items
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns whose heading ends with a colon are aligned right."""
    marks = ["--:" if name.endswith(":") else "---" for name in header]
    lines = ["| " + " | ".join(name.removesuffix(":") for name in header) + " |"]
    lines += ["|" + "|".join(marks) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def join(*parts: str) -> str:
    """Blocks with a blank line between them; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)
