"""What a user asks for: checked, and the numbers of micro-batches that a batch is cut into."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dapple.errors import InputError
from dapple.records import MOST_MICRO_BATCHES


def geometric_counts(batch: int) -> tuple[int, ...]:
    """M = 1, 2, 3, 4, 6, 8, 12, ... and the batch itself: no two neighbours 2 or more apart."""
    doubles = [2**k for k in range(batch.bit_length())]
    counts = {m for power in doubles for m in (power, 3 * power // 2)}
    return tuple(sorted({m for m in counts if m <= batch} | {batch}))


def even_counts(batch: int, replicas: int) -> tuple[int, ...]:
    """The least M with which none of so many replicas has more than 1, 2, 4, ... rows at a time.

    >>> even_counts(128, 12)  # 12 or 11 rows, one each; up to 2; up to 4; ...
    (11, 6, 3, 2, 1)
    """
    counts = [-(-batch // replicas)]
    while counts[-1] > 1:
        counts.append(-(-batch // (replicas * 2 ** len(counts))))
    return tuple(counts)


def check_batch(global_batch_size: int, micro_batch_size: int | None) -> None:
    """Raise an InputError for sizes that no step can have."""
    if global_batch_size < 1:
        raise InputError(f"global batch size {global_batch_size} must be at least 1 row")
    if micro_batch_size is not None and not 1 <= micro_batch_size <= global_batch_size:
        raise InputError(
            f"micro-batch size {micro_batch_size} must lie between 1 and the global batch size "
            f"{global_batch_size}"
        )
    count = math.ceil(global_batch_size / (micro_batch_size or global_batch_size))
    if count > MOST_MICRO_BATCHES:
        raise InputError(
            f"micro-batches of {micro_batch_size} cut {global_batch_size} rows into {count}, more "
            f"than {MOST_MICRO_BATCHES}; pass a larger micro-batch size"
        )


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raise an InputError for a name that is none of these."""
    if name not in known:
        raise InputError(f'{what} "{name}" is unknown; known: {", ".join(known)}')
