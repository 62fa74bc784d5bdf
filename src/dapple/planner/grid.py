"""The search space of the dynamic programme as arrays: cuts x device positions x replicas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dapple.planner.exposed import exposed_seconds
from dapple.planner.frame import Frame
from dapple.planner.problem import Problem
from dapple.planner.tables import CostTables, Ints
from dapple.planner.traffic import Devices, Floats


@dataclass(frozen=True)
class Grid:
    """Everything the dynamic programme needs to know. n marks, R replica counts.

    Attributes:
        frame: where stages may lie.
        options: shape (R,), which of the frame's replica counts are looked at.
        marks: shape (n + 1,), layer numbers at which stages may begin or end, 0 and N included.
        stage: shape (kinds, n + 1, n + 1): forward and backward seconds of a mean micro-batch of
            layers marks[i]..marks[j], infinite where they do not fit or j <= i.
        backward: shape (kinds, n + 1, n + 1): the backward part.
        link_forward, link_backward: shape (links, n + 1): seconds of a transfer.
        after: shape (reduces, n + 1, n + 1): seconds from the last backward's end to the update's,
            of stages of each kind and ring.
        micro_batches: M.
    """

    frame: Frame
    options: Ints
    marks: Ints
    stage: Floats
    backward: Floats
    link_forward: Floats
    link_backward: Floats
    after: Floats
    micro_batches: int

    def least_slowest(self) -> float:
        """No plan has a slowest stage below: the longest layer, or all work spread evenly."""
        kinds = np.unique(self.frame.kind[0, self.options])
        kinds = kinds[kinds >= 0]
        widths = np.array([len(self.frame.stages[k]) for k in kinds])
        steps = np.arange(len(self.marks) - 1)
        single = self.stage[kinds][:, steps, steps + 1]
        longest = single.min(axis=0).max()
        spread = (single * widths[:, None]).min(axis=0).sum() / len(self.frame.order)
        least = float(max(longest, spread))
        return least if np.isfinite(least) else 0.0


def choose_marks(tables: CostTables, limit: int) -> Ints:
    """At most about `limit` cuts, spread evenly over time and parameters, the cheapest of each."""
    layers = tables.profile.num_layers
    if layers <= limit:
        return np.arange(layers + 1)
    forward, backward = tables.layer_seconds(tables.first_rows)
    share = np.arange(layers + 1) / layers * 0.1
    for prefix in (forward + backward, tables.parameter_prefix):
        share = share + (prefix / prefix[-1] if prefix[-1] > 0 else 0.0)
    bucket = np.minimum((share / share[-1] * limit).astype(int), limit - 1)
    crossing = tables.crossing_bytes.forward
    cost = crossing.per_row * tables.first_rows + crossing.fixed
    inner = np.arange(1, layers)
    by_bucket = inner[np.lexsort((inner, cost[inner], bucket[inner]))]
    _, first = np.unique(bucket[by_bucket], return_index=True)
    return np.concatenate([[0], np.sort(by_bucket[first]), [layers]])


def make_grid(
    problem: Problem, frame: Frame, micro_batches: int, marks: Ints, in_flight: int
) -> Grid:
    """Fill in the arrays.

    Args:
        problem: what is planned.
        frame: where stages may lie.
        micro_batches: M.
        marks: layer numbers at which stages may begin or end.
        in_flight: how many micro-batches a stage must hold in its memory.
    """
    tables = problem.tables(micro_batches)
    options = _useful_options(frame, tables.first_rows)
    used = np.unique(frame.kind[:, options])
    shape = len(frame.stages), len(marks), len(marks)
    stage, backward = np.full(shape, np.inf), np.zeros(shape)
    for kind in used[used >= 0]:
        devices = frame.stages[kind]
        both, backward[kind] = _stage_seconds(tables, devices, marks)
        needed = _least_bytes(problem, tables, len(devices), marks, in_flight)
        stage[kind] = np.where(needed > problem.symmetry.least_memory(devices), np.inf, both)
    forward_links, backward_links = (np.zeros((len(frame.links), len(marks))) for _ in range(2))
    used = np.unique(frame.link[:, options])
    for number in used[used >= 0]:
        link = tables.link(*frame.links[number])
        forward_links[number], backward_links[number] = link.forward[marks], link.backward[marks]
    update = _differences(tables.optimizer_prefix, marks)
    exposed = np.zeros((len(frame.reduces), len(marks), len(marks)))
    used = np.unique(frame.reduce_kind[:, options])
    for number in used[used >= 0]:
        kind, fixed, rate = frame.reduces[number]
        if fixed or rate:
            last = tables.stage(frame.stages[kind]).likely_backward
            exposed[number] = exposed_seconds(tables.parameter_prefix, last, fixed, rate, marks)
    return Grid(
        frame=frame,
        options=options,
        marks=marks,
        stage=stage,
        backward=backward,
        link_forward=forward_links,
        link_backward=backward_links,
        after=exposed + update,
        micro_batches=micro_batches,
    )


def _useful_options(frame: Frame, rows: int) -> Ints:
    """Replica counts that shorten a micro-batch of so many rows: 5 replicas of 8 rows do not."""
    step = int(frame.positions[1])
    most_rows = [-(-rows // (int(width) * step)) for width in frame.widths]
    useful = [o for o, n in enumerate(most_rows) if o == 0 or n < most_rows[o - 1]]
    return np.array(useful)


def _stage_seconds(tables: CostTables, devices: Devices, marks: Ints) -> tuple[Floats, Floats]:
    table = tables.stage(devices)
    both = _differences(table.work, marks) / tables.micro_batches
    empty = np.tri(len(marks), dtype=np.bool_)
    return np.where(empty, np.inf, both), _differences(table.likely_backward, marks)


def _least_bytes(
    problem: Problem, tables: CostTables, replicas: int, marks: Ints, in_flight: int
) -> Floats:
    """Parameters, gradients, optimizer state and so many saved micro-batches, roughly."""
    if not problem.memory_is_known:
        return np.zeros((len(marks), len(marks)))
    saved = tables.saved_prefix(-(-tables.first_rows // replicas))
    factor = 2 + problem.state_factor(replicas, problem.shard)
    fixed = factor * _differences(tables.parameter_prefix, marks)
    return fixed + min(in_flight, tables.micro_batches) * _differences(saved, marks)


def _differences(prefix: Floats, marks: Ints) -> Floats:
    """Sums over marks[i]..marks[j], shape (n + 1, n + 1)."""
    values = prefix[marks]
    sums: Floats = values[None, :] - values[:, None]
    return sums
