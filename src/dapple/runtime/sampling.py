"""Reading only the rows that a rank needs: a batch sampler for `torch.utils.data.DataLoader`.

    sampler = PlanSampler(trainer, len(dataset), global_batch_size=512, seed=1)
    for inputs, targets in DataLoader(dataset, batch_sampler=sampler):
        trainer.step(inputs, targets, global_batch_size=512)

All ranks shuffle alike, so that together they read each row of a global batch where it is needed:
its inputs on the stages that take inputs, its targets on the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch.utils.data import Sampler

from dapple.errors import InputError


class OwnRows(Protocol):
    """Knows the rows of a global batch that this rank needs; a Trainer does."""

    def own_rows(self, global_batch_size: int) -> list[int]:
        """Their numbers, ascending; never none, so that there is something to collate."""


class PlanSampler(Sampler[list[int]]):
    """Yields, for every step of an epoch, the indices into the dataset that this rank has to read.

    Iterating goes on where `step` is; at the end of an epoch the next one begins with another
    order. Rows that do not fill a last global batch are left out of their epoch.

    Args:
        trainer: whose rows.
        dataset_size: examples in the dataset, the same on every rank.
        global_batch_size: rows of a step.
        shuffle: another order in every epoch; False: as they lie.
        seed: of the orders, the same on every rank.
        step: steps done before, to go on after a restart.

    Raises:
        InputError: the dataset is smaller than a batch, or a number is out of range.
    """

    def __init__(
        self,
        trainer: OwnRows,
        dataset_size: int,
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        step: int = 0,
    ) -> None:
        if global_batch_size < 1 or step < 0:
            raise InputError(
                f"global_batch_size is {global_batch_size} and step {step}; give at least 1 and 0"
            )
        if dataset_size < global_batch_size:
            raise InputError(
                f"the dataset has {dataset_size} examples, fewer than the global batch of "
                f"{global_batch_size}; take a smaller batch or more data"
            )
        self._own = trainer.own_rows(global_batch_size)
        self._size = dataset_size
        self._batch = global_batch_size
        self._shuffle = shuffle
        self._seed = seed
        self.step = step

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self._size // self._batch

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the epoch that `step` lies in."""
        # A loader that reads ahead asks for more than is trained: its own copy of the position.
        epoch, first = divmod(self.step, len(self))
        order = self._order(epoch)
        self.step = (epoch + 1) * len(self)
        for number in range(first, len(self)):
            start = number * self._batch
            yield [order[start + row] for row in self._own]

    def state_dict(self, steps_done: int) -> dict[str, int]:
        """What a checkpoint keeps: the steps that were trained, not those that were read ahead."""
        return {"step": steps_done, **self._order_of()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a run was, over the same data in the same order.

        Raises:
            InputError: the state was made for another order, or holds no number of steps.
        """
        for name, own in self._order_of().items():
            if state.get(name) != own:
                raise InputError(
                    f"the position was saved with {name} {state.get(name)}, but this sampler has "
                    f"{own}: rows would come twice or never; make it as it was, or start anew"
                )
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise InputError(f"the position holds step {step!r}; it has to be a number from 0 on")
        self.step = step

    def _order_of(self) -> dict[str, int]:
        """What the order of the data depends on."""
        return {
            "seed": self._seed,
            "dataset_size": self._size,
            "global_batch_size": self._batch,
            "shuffle": self._shuffle,
        }

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self._size, generator=generator).tolist()
        return order
