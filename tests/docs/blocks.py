"""Code blocks of the documentation that tests read or run.

A block counts if an HTML comment stands before it:

    <!-- test: file own.py -->       the block is a file of that name
    <!-- test: run -->               the block's lines after "$ " are run
    <!-- test: NAME -->              an example that some test looks for by name
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^<!-- test: (.+?) -->\n```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A marked block."""

    mark: str
    text: str


def blocks(document: str) -> list[Block]:
    """The marked blocks of a document, in order."""
    return [Block(*found) for found in _BLOCK.findall((ROOT / document).read_text("utf-8"))]


def example(document: str, mark: str) -> str:
    """The one block with this mark."""
    (text,) = [block.text for block in blocks(document) if block.mark == mark]
    return text


def section(document: str, title: str) -> str:
    """The text below a heading of the second level."""
    text = (ROOT / document).read_text("utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]
