"""Python's garbage collector during a search."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLD = 100_000
"""Objects that are made before the collector looks for cycles among them."""


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let the collector run seldom, for a while; it is as before in the end.

    A search makes many objects that live to its end, and hardly any cycle. Looking for cycles in all
    of them and in whatever the process holds takes more than a twentieth of a short search.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _THRESHOLD:
        yield
        return
    gc.set_threshold(_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
