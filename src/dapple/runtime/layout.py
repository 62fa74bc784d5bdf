"""Which rows of a step go where: micro-batches, their split over replicas, and the messages.

micro-batch of 7 rows        stage 0, 3 replicas      stage 1, 2 replicas
rows 0 1 2 3 4 5 6           [0 1 2] [3 4] [5 6]      [0 1 2 3] [4 5 6]
                              messages: 0->0 rows 0-2, 1->0 row 3, 1->1 row 4, 2->1 rows 5-6
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from dapple.costs.rows import overlaps, split_rows
from dapple.graph import Rows
from dapple.runtime.topology import Topology


@dataclass(frozen=True)
class Piece:
    """A row range of a boundary tensor that this rank exchanges with one peer.

    Attributes:
        peer: the other rank.
        start, stop: rows, counted from the first row that this rank holds. (0, 0) for a tensor
            without rows, which travels whole.
    """

    peer: int
    start: int
    stop: int


class Layout:
    """How the rows of a step lie, seen from one rank; the same in all its stages.

    Answers are kept: use it for many steps.

    Args:
        topology: this rank's place.
        global_batch_size: rows of the step, at least 1.
        lengths: of the batch's other dimensions that change from step to step, by name.
    """

    def __init__(
        self,
        topology: Topology,
        global_batch_size: int,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        plan = topology.plan
        self.topology = topology
        self.global_batch_size = global_batch_size
        self.lengths = dict(lengths or {})
        same = global_batch_size == plan.global_batch_size
        size = plan.micro_batch_size
        self.num_micro_batches = plan.num_micro_batches if same else -(-global_batch_size // size)
        self._sizes = split_rows(global_batch_size, self.num_micro_batches)
        self._starts = (0, *itertools.accumulate(self._sizes))
        # By the rows of a micro-batch, of which there are two numbers at most.
        self._split_of: dict[tuple[int, int], tuple[int, ...]] = {}
        self._pieces_of: dict[tuple[int, int, int, bool], list[Piece]] = {}

    def rows(self, micro_batch: int) -> int:
        """Rows of a micro-batch that this rank's replica works on."""
        return self.sized(self._split(micro_batch, self.topology.stage)[self.topology.replica])

    def sized(self, rows: int) -> int:
        """Rows that know the lengths of the batch, if it has any."""
        return Rows(rows, self.lengths) if self.lengths else rows

    def micro_batch_rows(self, micro_batch: int) -> int:
        """Rows of a whole micro-batch."""
        return self._sizes[micro_batch]

    @property
    def has_absent(self) -> bool:
        """Some replica of this rank's stage has no rows of some micro-batch that has any."""
        return any(0 in split for split in self._splits())

    @property
    def always_present(self) -> int:
        """The first replica of this rank's stage that has rows of every micro-batch with any."""
        splits = self._splits()
        return next(r for r in range(len(splits[0])) if all(split[r] for split in splits))

    def _splits(self) -> list[tuple[int, ...]]:
        stage = self.topology.stage
        return [self._split(m, stage) for m, rows in enumerate(self._sizes) if rows]

    def slice(self, micro_batch: int) -> slice:
        """This replica's rows of a micro-batch, within the global batch."""
        sizes = self._split(micro_batch, self.topology.stage)
        start = self._starts[micro_batch] + sum(sizes[: self.topology.replica])
        return slice(start, start + sizes[self.topology.replica])

    def pieces(self, micro_batch: int, here: int, stage: int, with_rows: bool) -> list[Piece]:
        """What this rank exchanges with another stage for one boundary tensor.

        Args:
            micro_batch: the micro-batch.
            here: the stage of this rank that makes or reads the tensor.
            stage: the other stage, before or after it.
            with_rows: the tensor has rows; otherwise it is the same for every row, and each
                replica that reads it gets it from one replica that makes it.
        """
        key = self._sizes[micro_batch], here, stage, with_rows
        found = self._pieces_of.get(key)
        if found is None:
            found = self._pieces_of[key] = self._find_pieces(micro_batch, here, stage, with_rows)
        return found

    def _find_pieces(self, micro_batch: int, here: int, stage: int, with_rows: bool) -> list[Piece]:
        first, last = min(here, stage), max(here, stage)
        senders, receivers = self._split(micro_batch, first), self._split(micro_batch, last)
        mine, other = (0, 1) if here == first else (1, 0)
        peers = self.topology.ranks[stage]
        if not with_rows:
            pairs = _whole_pairs(senders, receivers)
            return [Piece(peers[p[other]], 0, 0) for p in pairs if p[mine] == self.topology.replica]
        pieces, position = [], 0
        for pair in overlaps(senders, receivers):
            if pair[mine] == self.topology.replica:
                pieces.append(Piece(peers[pair[other]], position, position + pair[2]))
                position += pair[2]
        return pieces

    def _split(self, micro_batch: int, stage: int) -> tuple[int, ...]:
        key = self._sizes[micro_batch], stage
        found = self._split_of.get(key)
        if found is None:
            plan = self.topology.plan.stages[stage]
            found = self._split_of[key] = split_rows(key[0], plan.replicas, plan.rows)
        return found


def _whole_pairs(senders: tuple[int, ...], receivers: tuple[int, ...]) -> list[tuple[int, int]]:
    active = [i for i, rows in enumerate(senders) if rows]
    readers = [j for j, rows in enumerate(receivers) if rows]
    return [(active[n % len(active)], j) for n, j in enumerate(readers)] if active else []
