from __future__ import annotations

from tests.runtime.pairwise import all_pairs, pairs_of, pairwise
from tests.runtime.runs import FACTORS, PAIRWISE_RUNS


def test_every_pair_of_choices_meets_in_some_row() -> None:
    """No two values of different factors are left out, whatever the numbers of values."""
    factors = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False, None, 0.5], "d": [0]}
    seen = {pair for row in pairwise(factors) for pair in pairs_of(row, factors)}
    assert seen == set(all_pairs(factors))


def test_rows_are_few_and_the_same_each_time() -> None:
    """Far fewer rows than combinations, and no chance in them."""
    factors = {name: list(range(3)) for name in "abcdefgh"}
    rows = pairwise(factors)
    assert len(rows) <= 25
    assert rows == pairwise(factors)


def test_the_parity_runs_show_every_pair() -> None:
    """The runs on real processes leave out no two choices that could clash."""
    rows = [
        {
            "replicas": run.replicas,
            "model": run.model,
            "num_micro_batches": run.num_micro_batches,
            "rows": run.rows,
            "optimizer": run.optimizer,
            "schedule": run.schedule,
            "split": run.split,
        }
        for run in PAIRWISE_RUNS
    ]
    seen = {pair for row in rows for pair in pairs_of(row, FACTORS)}
    assert seen == set(all_pairs(FACTORS))
    assert len(rows) <= 45
