"""Real text that ships with every Python: the help topics of `pydoc_data.topics`, as bytes.

About 0.46 MB of English and Python. It differs between versions of Python, so ranks that are to
see the same batches must run the same one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from itertools import count as count_from
from pydoc_data import topics

import torch
from torch import Tensor

from dapple.errors import InputError

SPLITS = ("train", "validation")
TRAIN_FRACTION = 0.9


def split_text(split: str) -> Tensor:
    """The bytes of a split, [length] uint8: the first 90 % for "train", the rest "validation".

    Do not write into it: it is shared by all callers.

    Raises:
        InputError: the split's name is unknown.
    """
    if split not in SPLITS:
        raise InputError(f'split "{split}" is unknown; use {" or ".join(SPLITS)}')
    text = _whole_text()
    border = int(TRAIN_FRACTION * len(text))
    return text[:border] if split == "train" else text[border:]


def batches(
    split: str, global_batch_size: int, context: int, seed: int, first_step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of a split for ever, one global batch per step.

    A batch depends on (split, sizes, seed, step) and on nothing else: every rank that asks gets
    the same, and a resumed run continues with `first_step`.

    Args:
        split: "train" or "validation".
        global_batch_size: B, rows of a batch, >= 1.
        context: T, bytes of a row, >= 1.
        seed: any integer.
        first_step: number of the first batch.

    Returns:
        An iterator of (tokens [B, T] int64, targets [B, T] int64), where a target is the byte
        after its token.

    Raises:
        InputError: a name or a size is wrong; raised here, not at the first batch.
    """
    text = _checked_text(split, global_batch_size, context)
    return (
        _windows(text, _random_starts(len(text), global_batch_size, context, seed, step), context)
        for step in count_from(first_step)
    )


def validation_batches(
    count: int, global_batch_size: int, context: int
) -> list[tuple[Tensor, Tensor]]:
    """The same `count` batches each time, spread evenly over the validation text.

    Args:
        count: number of batches, >= 1.
        global_batch_size: B, rows of a batch, >= 1.
        context: T, bytes of a row, >= 1.

    Returns:
        A list of (tokens [B, T] int64, targets [B, T] int64), as `batches` gives them.

    Raises:
        InputError: a size is wrong.
    """
    if count < 1:
        raise InputError(f"count of validation batches {count} is too small; use 1 or more")
    text = _checked_text("validation", global_batch_size, context)
    last_start = len(text) - context - 1
    rows = count * global_batch_size
    starts = [last_start * row // max(rows - 1, 1) for row in range(rows)]
    # Strided, so that each batch covers the whole text and any few of them are representative.
    return [_windows(text, starts[batch::count], context) for batch in range(count)]


@functools.cache
def _whole_text() -> Tensor:
    joined = "\n\n".join(text for _, text in sorted(topics.topics.items()))
    return torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8)


def _checked_text(split: str, global_batch_size: int, context: int) -> Tensor:
    text = split_text(split)
    if global_batch_size < 1:
        raise InputError(f"global batch size {global_batch_size} is too small; use 1 or more")
    if not 1 <= context < len(text):
        raise InputError(
            f"context {context} does not fit the {split} text of {len(text)} bytes; "
            f"use 1 to {len(text) - 1}"
        )
    return text


def _random_starts(length: int, rows: int, context: int, seed: int, step: int) -> list[int]:
    # Seeded by a string, which Python hashes whole; torch's CPU generator would keep only the low
    # 32 bits of a seed, so that packing seed and step into one number loses one of them.
    generator = random.Random(f"{seed}:{step}")
    return [generator.randrange(length - context) for _ in range(rows)]


def _windows(text: Tensor, starts: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
    rows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
