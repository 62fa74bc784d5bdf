"""Which rows of a global batch a rank needs, and where they lie in what it was handed.

global batch, M = 2      0 1 2 3 4 | 5 6 7 8 9
replica 1 of 2               3 4         8 9      own_rows: 3, 4, 8, 9
handed to it             3 4 8 9                  Window: rows 8..10 are its 2..4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dapple.runtime.layout import Layout


class Window:
    """Where row ranges of the global batch lie in a rank's own tensors.

    Args:
        parts: (first row, row after the last) of each range that the rank was handed, in order;
            None: it was handed all rows.
    """

    def __init__(self, parts: Sequence[tuple[int, int]] | None = None) -> None:
        self._parts = parts

    def local(self, where: slice) -> slice:
        """The same rows, counted in what the rank was handed.

        Args:
            where: a range within one of its parts.
        """
        if self._parts is None or where.stop <= where.start:
            return where
        position = 0
        for start, stop in self._parts:
            if start <= where.start and where.stop <= stop:
                shift = position - start
                return slice(where.start + shift, where.stop + shift)
            position += stop - start
        raise AssertionError(f"rows {where.start}..{where.stop} are not this rank's")


class Handed(NamedTuple):
    """What a rank was handed of a global batch.

    Attributes:
        inputs, targets: as the user gave them.
        named: the inputs by their names in the graph.
        layout: the rows of the step.
        window: where they lie in inputs and targets.
    """

    inputs: Any
    targets: Any
    named: dict[str, Any]
    layout: Layout
    window: Window


def own_parts(layout: Layout) -> list[tuple[int, int]]:
    """The row ranges that a rank works on, one per micro-batch in which it has any."""
    places = (layout.slice(m) for m in range(layout.num_micro_batches))
    return [(place.start, place.stop) for place in places if place.stop > place.start]
