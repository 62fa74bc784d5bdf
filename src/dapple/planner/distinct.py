"""Different numbers of an array, without what `numpy.unique` imports first."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def distinct(values: ArrayLike) -> NDArray[np.int64]:
    """The different whole numbers among some, ascending; shape (n,).

    `numpy.unique` is faster on long arrays, but its first call imports `numpy.ma`, which takes
    longer than everything that a search of seconds asks here.

    >>> distinct([[3, 1], [1, 2]]).tolist()
    [1, 2, 3]
    """
    return np.array(sorted(set(np.ravel(values).tolist())), dtype=np.int64)
