"""Few combinations that show every pair of choices: most faults need only two to come together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

Choice = tuple[str, Hashable]


def pairwise(
    factors: Mapping[str, Sequence[Hashable]],
    never: Callable[[Choice, Choice], bool] = lambda one, other: False,
) -> list[dict[str, Hashable]]:
    """Rows of one value per factor in which every two values of different factors meet.

    Greedy: each row starts with a pair not seen yet, and takes for each other factor, in turn, the
    value that adds most new pairs. The same rows at every call.

    Args:
        factors: the values of each.
        never: which two choices, in the order of the factors, are left out; each factor needs a
            value that goes with all others.
    """
    waiting = dict.fromkeys(pair for pair in all_pairs(factors) if not never(*pair))
    rows: list[dict[str, Hashable]] = []
    while waiting:
        row: dict[str, Hashable] = dict(next(iter(waiting)))
        for name in factors:
            if name not in row:
                chosen = list(row.items())
                row[name] = max(
                    [
                        value
                        for value in factors[name]
                        if not any(never(*_pair(c, (name, value), factors)) for c in chosen)
                    ],
                    key=lambda value, n=name, c=chosen: sum(
                        _pair(other, (n, value), factors) in waiting for other in c
                    ),
                )
        for pair in pairs_of(row, factors):
            waiting.pop(pair, None)
        rows.append({name: row[name] for name in factors})
    return rows


def all_pairs(factors: Mapping[str, Sequence[Hashable]]) -> list[tuple[Choice, Choice]]:
    """Every two values of different factors."""
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    ]


def pairs_of(
    row: Mapping[str, Hashable], factors: Mapping[str, Sequence[Hashable]]
) -> list[tuple[Choice, Choice]]:
    """The pairs that one row shows."""
    return [((a, row[a]), (b, row[b])) for a, b in itertools.combinations(factors, 2)]


def _pair(
    one: Choice, other: Choice, factors: Mapping[str, Sequence[Hashable]]
) -> tuple[Choice, Choice]:
    order = list(factors)
    return (one, other) if order.index(one[0]) < order.index(other[0]) else (other, one)
