"""What `torch.export` says when it fails, as one line that a user can act on."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO

from torch import nn

_MAX_CHARACTERS = 400
# On a branch on data, export prints the graph up to it on standard error, with the source of each
# operator: the last one is where the branch is.
_SOURCE = re.compile(r"# File: (.*?:\d+) in \w+, code: (.*)")


@contextmanager
def export_output_kept() -> Iterator[StringIO]:
    """Keep what export prints on standard error, graphs of many pages, from the user's screen."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    printed = StringIO()
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(printed):
            yield printed
    finally:
        logger.setLevel(level)


def export_failure(model: nn.Module, error: Exception, printed: str) -> str:
    """The fact, where it is in the user's code, and a remedy.

    Args:
        model: the model that export failed on.
        error: what export raised.
        printed: what it printed on standard error.
    """
    text = " ".join(str(error).split())
    text = text.split(" For more information, run with")[0].split(" Caused by: (_export")[0]
    shown = text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " ..."
    sources = _SOURCE.findall(printed)
    where = f" (at {sources[-1][0]}: {sources[-1][1].strip()})" if sources else ""
    remedy = "make the forward free of branches on tensor values, or pass inputs of typical size"
    if "batch" in text and ("specialized" in text or "Constraints violated" in text):
        remedy = "the forward fixes the batch size somewhere; take sizes from the input's shape"
    return f"{type(model).__name__} can't be captured by torch.export: {shown}{where}; {remedy}"
