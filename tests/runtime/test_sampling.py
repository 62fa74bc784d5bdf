"""Ranks that are handed only the rows that they read, and the sampler that picks them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from dapple.errors import InputError
from dapple.job import Job
from dapple.runtime.data import JobData
from dapple.runtime.sampling import PlanSampler
from dapple.runtime.trainer import Trainer
from dapple.runtime.window import Window
from tests.runtime import cases
from tests.runtime.threads import on_ranks


def picked(value: Any, rows: list[int]) -> Any:
    """These rows of every tensor."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t[rows], value)


@pytest.mark.parametrize(
    ("name", "replicas", "rows", "micro_batches", "changes"),
    [
        ("gpt", (2, 3), 13, 4, {}),
        ("skip", (1, 1, 2), 5, 3, {}),
        ("mlp", (3,), 7, 2, {}),
        ("inside", (2, 1), 6, 2, {}),
        ("gpt", (2, 1), 13, 4, {"schedule": "interleaved", "virtual": 2}),
        ("skip", (1, 2), 3, 4, {"schedule": "interleaved", "virtual": 2}),
    ],
)
def test_own_rows_give_bitwise_what_the_whole_batch_gives(
    name: str, replicas: tuple[int, ...], rows: int, micro_batches: int, changes: dict[str, Any]
) -> None:
    """Training and evaluation, with weights that depend on inputs and targets; virtual stages too."""
    graph, example = cases.build(name), cases.EXAMPLES[name]
    inputs, targets = example.batch(rows, 0)

    def work(own: bool) -> Any:
        def on_rank(trainer: Trainer) -> list[Any]:
            if not own:
                step = trainer.step(inputs, targets)
                return [step.loss, float(trainer.evaluate(inputs, targets)), trainer.state_dict()]
            mine = trainer.own_rows(rows)
            batch = picked(inputs, mine), picked(targets, mine)
            step = trainer.step(*batch, global_batch_size=rows)
            loss = float(trainer.evaluate(*batch, global_batch_size=rows))
            return [step.loss, loss, trainer.state_dict()]

        return on_rank

    plan = cases.make_plan(graph, replicas, rows, micro_batches, **changes)
    whole, parts = (on_ranks(graph, plan, work(o), weight=example.weight) for o in (False, True))
    for one, other in zip(whole, parts, strict=True):
        assert one[:2] == other[:2]
        assert all(torch.equal(value, other[2][name]) for name, value in one[2].items())


def test_ranks_read_what_they_need_and_no_more() -> None:
    """First and last stage share out the rows; the middle reads one for the collating alone."""
    graph = cases.build("mlp")
    plan = cases.make_plan(graph, (2, 1, 3), 12, 2)
    rows = on_ranks(graph, plan, lambda trainer: trainer.own_rows(12))
    assert rows[0] == [0, 1, 2, 6, 7, 8]
    assert rows[1] == [3, 4, 5, 9, 10, 11]
    assert rows[2] == [0]
    assert [len(r) for r in rows[3:]] == [4, 4, 4]
    assert sorted(row for part in rows[3:] for row in part) == list(range(12))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_a_window_finds_any_range_of_a_part(sizes: list[int], data: st.DataObject) -> None:
    """Parts with gaps between them."""
    parts, place = [], 0
    for size in sizes:
        place += data.draw(st.integers(0, 3))
        parts.append((place, place + size))
        place += size
    handed = [row for start, stop in parts for row in range(start, stop)]
    start, stop = data.draw(st.sampled_from(parts))
    first = data.draw(st.integers(start, stop - 1))
    last = data.draw(st.integers(first + 1, stop))
    assert handed[Window(parts).local(slice(first, last))] == list(range(first, last))


class Reads:
    """Stands for a trainer that reads these rows of every batch."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def own_rows(self, global_batch_size: int) -> list[int]:
        return self.rows


def test_samplers_of_all_ranks_read_every_example_of_an_epoch_once() -> None:
    """In one order, another one each epoch; what fills no batch is left out."""
    samplers = [PlanSampler(Reads(rows), 11, 4, seed=3) for rows in ([0, 1], [2, 3])]
    epochs = []
    for _ in range(2):
        steps = [[*a, *b] for a, b in zip(*samplers, strict=True)]
        assert len(steps) == len(samplers[0]) == 2
        read = [row for step in steps for row in step]
        assert len(set(read)) == 8
        epochs.append(read)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("done", [0, 1, 3, 4, 9])
def test_a_sampler_goes_on_where_training_was(done: int) -> None:
    """Whatever the loader had read ahead."""

    def endless(sampler: PlanSampler) -> Any:
        while True:
            yield from sampler

    first = PlanSampler(Reads([0, 2]), 10, 3, seed=1)
    steps = endless(first)
    before = [next(steps) for _ in range(12)]
    again = PlanSampler(Reads([0, 2]), 10, 3, seed=1)
    again.load_state_dict(first.state_dict(done))
    others = endless(again)
    assert [next(others) for _ in range(12 - done)] == before[done:]


def test_a_loader_with_the_sampler_trains_as_whole_batches_do() -> None:
    """`DataLoader` and `TensorDataset` of torch, on every rank of a pipeline."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]
    inputs, targets = example.batch(12, 0)
    (x,) = inputs if isinstance(inputs, tuple) else (inputs,)
    plan = cases.make_plan(graph, (1, 2), 4, 2)

    def sampled(trainer: Trainer) -> list[float]:
        sampler = PlanSampler(trainer, 12, 4, shuffle=False)
        loader = DataLoader(TensorDataset(x, targets), batch_sampler=sampler)
        return [trainer.step((a,), b, global_batch_size=4).loss for a, b in loader]

    def whole(trainer: Trainer) -> list[float]:
        return [trainer.step((x[n : n + 4],), targets[n : n + 4]).loss for n in (0, 4, 8)]

    assert on_ranks(graph, plan, sampled) == on_ranks(graph, plan, whole)


def test_mistakes_are_named() -> None:
    """Too many rows handed over, a batch of nothing, too little data, another seed."""
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]

    def work(trainer: Trainer) -> None:
        with pytest.raises(InputError, match="handed 12 rows but reads 6"):
            trainer.step(*example.batch(12, 0), global_batch_size=12)
        with pytest.raises(InputError, match="global_batch_size is 0"):
            trainer.step(*example.batch(12, 0), global_batch_size=0)

    on_ranks(graph, cases.make_plan(graph, (2,), 12, 2), work)
    with pytest.raises(InputError, match="3 examples, fewer than"):
        PlanSampler(Reads([0]), 3, 4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed 1, but this sampler has 2"),
        ({"global_batch_size": 2}, "global_batch_size 2, but this sampler has 4"),
        ({"dataset_size": 9}, "dataset_size 9, but this sampler has 8"),
        ({"shuffle": False}, "shuffle False, but this sampler has True"),
        ({"step": -1}, "step -1"),
        ({"step": "2"}, "step '2'"),
    ],
)
def test_a_position_in_another_order_of_the_data_is_refused(
    change: dict[str, Any], told: str
) -> None:
    """Some rows would come twice in an epoch, and others never."""
    sampler = PlanSampler(Reads([0]), 8, 4, seed=2)
    with pytest.raises(InputError, match=told):
        sampler.load_state_dict(sampler.state_dict(1) | change)


def test_a_job_whose_data_is_a_dataset_reads_its_own_rows() -> None:
    """And one whose factory makes batches hands over all rows."""
    job = Job.model_validate(
        {
            "name": "own",
            "folder": "unused",
            "model": {"factory": "mlp"},
            "data": {"factory": f"{__name__}:numbers"},
            "training": {"steps": 1, "global_batch_size": 4},
        }
    )
    data = JobData(job, "validation")
    steps = data.steps(Reads([1, 3]))
    found = [next(steps) for _ in range(4)]
    assert [step.inputs.tolist() for step in found] == [[1, 3], [5, 7], [1, 3], [5, 7]]
    assert {step.global_batch_size for step in found} == {4}
    assert JobData(job, "train").first()[0].tolist() == [0]
    listed = job.model_copy(
        update={"data": job.data.model_copy(update={"arguments": {"whole": True}})}
    )
    step = next(JobData(listed, "train").steps(Reads([1])))
    assert (step.inputs.tolist(), step.global_batch_size) == (list(range(10)), None)


def numbers(split: str, global_batch_size: int, seed: int, whole: bool = False) -> Any:
    """Ten examples, or one batch of them all."""
    values = torch.arange(10)
    return [(values, values)] if whole else TensorDataset(values, values)
