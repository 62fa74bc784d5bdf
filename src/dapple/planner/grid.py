"""The search space of the dynamic programme as arrays: cuts x device positions x replicas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dapple.planner.distinct import distinct
from dapple.planner.exposed import exposed_seconds
from dapple.planner.frame import Frame
from dapple.planner.problem import Problem
from dapple.planner.tables import CostTables, Ints, shared_update
from dapple.planner.traffic import Devices, Floats

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Grid:
    """Everything the dynamic programme needs to know. n marks, R replica counts.

    Attributes:
        frame: where stages may lie.
        options: shape (R,), which of the frame's replica counts are looked at.
        marks: shape (n + 1,), layer numbers at which stages may begin or end, 0 and N included.
        stage: shape (kinds, n + 1), prefix sums: forward and backward seconds of a mean micro-batch.
        reach: shape (kinds, n + 1): the last mark up to which the memory suffices from each mark.
        backward: shape (kinds, n + 1), prefix sums: the backward part.
        link_forward, link_backward: shape (links, n + 1): seconds of a transfer.
        after: shape (reduces, n + 1, n + 1): seconds from the last backward's end to the update's,
            of stages of each kind and ring.
        micro_batches: M.
    """

    frame: Frame
    options: Ints
    marks: Ints
    stage: Floats
    reach: Ints
    backward: Floats
    link_forward: Floats
    link_backward: Floats
    after: Floats
    micro_batches: int

    @cached_property
    def least_slowest(self) -> float:
        """No plan has a slowest stage below: the longest layer, or all work spread evenly."""
        return float(max(self._least(1).max(), self._least_work[-1] / len(self.frame.order)))

    @cached_property
    def _least_work(self) -> Floats:
        """Prefix sums of the devices x seconds that the layers between the marks take at least."""
        return np.concatenate([[0.0], np.cumsum(self._least(self._widths[:, None]))])

    @cached_property
    def _kinds(self) -> Ints:
        kinds = distinct(self.frame.kind[:, self.options])
        return kinds[kinds >= 0]

    @cached_property
    def _widths(self) -> Ints:
        return np.array([len(self.frame.stages[k]) for k in self._kinds])

    def _least(self, weights: Ints | int) -> Floats:
        least: Floats = (np.diff(self.stage[self._kinds]) * weights).min(axis=0)
        return least

    def ends(self, kinds: Ints, begins: Ints, longest: Floats) -> Ints:
        """Up to which mark stages can go that begin at a mark and may take so long; shape (P,)."""
        flat, apart = self._in_a_row
        size = len(self.marks)
        most = flat[kinds * size + begins] + np.minimum(longest * (1 + _ROUNDING), apart / 2)
        ends: Ints = np.searchsorted(flat, most, side="right") - 1 - kinds * size
        return np.minimum(ends, self.reach[kinds, begins])

    @cached_property
    def _in_a_row(self) -> tuple[Floats, float]:
        """The stages' prefix sums one behind the other, ascending, and how far apart they begin."""
        apart = 4.0 * float(self.stage.max()) + 1.0
        return (self.stage + apart * np.arange(len(self.stage))[:, None]).reshape(-1), apart

    def band(self, slowest: float) -> tuple[Ints, Ints]:
        """First and last mark per position up to which its devices can and must have come.

        Args:
            slowest: seconds that no stage may exceed.
        """
        before, work = self.frame.positions, self._least_work
        slowest = min(slowest, work[-1])
        done = slowest * before * (1 + _ROUNDING)
        rest = slowest * (before[-1] - before) * (1 + _ROUNDING)
        last = np.searchsorted(work, done, side="right") - 1
        first = np.searchsorted(work, work[-1] - rest, side="left")
        return first, last


def choose_marks(tables: CostTables, limit: int) -> Ints:
    """At most about `limit` cuts, spread evenly over time and parameters, the cheapest of each."""
    layers = tables.profile.num_layers
    if layers <= limit:
        return np.arange(layers + 1)
    forward, backward = tables.layers.layer_seconds(tables.first_rows)
    share = np.arange(layers + 1) / layers * 0.1
    for prefix in (forward + backward, tables.layers.parameter_prefix):
        share = share + (prefix / prefix[-1] if prefix[-1] > 0 else 0.0)
    bucket = np.minimum((share / share[-1] * limit).astype(int), limit - 1)
    crossing = tables.layers.crossing_bytes.forward
    cost = crossing.per_row * tables.first_rows + crossing.fixed
    inner = np.arange(1, layers)
    by_bucket = inner[np.lexsort((inner, cost[inner], bucket[inner]))]
    first = np.flatnonzero(np.diff(bucket[by_bucket], prepend=-1))
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
    options = _useful_options(frame, tables.first_rows, problem.proportional)
    used = distinct(frame.kind[:, options])
    shape = len(frame.stages), len(marks)
    stage, backward = np.zeros(shape), np.zeros(shape)
    reach = np.full(shape, len(marks) - 1)
    for kind in used[used >= 0]:
        devices = frame.stages[kind]
        table = tables.stage(devices)
        stage[kind] = table.work[marks] / micro_batches
        backward[kind] = table.likely_backward[marks]
        if problem.memory_is_known:
            reach[kind] = _reach(problem, tables, devices, marks, in_flight)
    forward_links, backward_links = (np.zeros((len(frame.links), len(marks))) for _ in range(2))
    used = distinct(frame.link[:, options])
    for number in used[used >= 0]:
        link = tables.link(*frame.links[number])
        forward_links[number], backward_links[number] = link.forward[marks], link.backward[marks]
    update = _differences(tables.layers.optimizer_prefix, marks)
    exposed = np.zeros((len(frame.reduces), len(marks), len(marks)))
    used = distinct(frame.reduce_kind[:, options])
    rings = [number for number in used[used >= 0] if any(frame.reduces[number][1:])]
    if rings:
        kinds, fixed, rate = zip(*(frame.reduces[number] for number in rings), strict=True)
        last = np.array([tables.stage(frame.stages[k]).likely_backward for k in kinds])
        ring = np.array(fixed), np.array(rate)
        exposed[rings] = exposed_seconds(tables.layers.parameter_prefix, last, *ring, marks)
        if problem.shard:
            widths = np.array([len(frame.stages[k]) for k in kinds])[:, None, None]
            sizes = _differences(tables.layers.parameter_prefix, marks)
            whole = ring[0][:, None, None] + ring[1][:, None, None] * sizes
            exposed[rings] += shared_update(update, widths, whole) - update
    return Grid(
        frame=frame,
        options=options,
        marks=marks,
        stage=stage,
        reach=reach,
        backward=backward,
        link_forward=forward_links,
        link_backward=backward_links,
        after=exposed + update,
        micro_batches=micro_batches,
    )


def _useful_options(frame: Frame, rows: int, proportional: bool) -> Ints:
    """Replica counts that shorten a micro-batch of so many rows: 5 replicas of 8 rows do not.

    With rows in proportion to speed any further replica with a row does.
    """
    if proportional:
        return np.flatnonzero(frame.positions[frame.widths] <= max(rows, frame.positions[1]))
    step = int(frame.positions[1])
    most_rows = [-(-rows // (int(width) * step)) for width in frame.widths]
    useful = [o for o, n in enumerate(most_rows) if o == 0 or n < most_rows[o - 1]]
    return np.array(useful)


def _reach(
    problem: Problem, tables: CostTables, devices: Devices, marks: Ints, in_flight: int
) -> Ints:
    """How far parameters, gradients, state and so many saved micro-batches fit, roughly."""
    factor = 2 + problem.state_factor(len(devices), problem.shard)
    count = min(in_flight, tables.micro_batches)
    reach: Ints = np.full(len(marks), len(marks) - 1)
    for rows, memory in tables.splits.loads(devices):
        saved = tables.layers.saved_prefix(rows)
        held = (factor * tables.layers.parameter_prefix + count * saved)[marks]
        reach = np.minimum(reach, np.searchsorted(held, held + memory, side="right") - 1)
    return reach


def _differences(prefix: Floats, marks: Ints) -> Floats:
    """Sums over marks[i]..marks[j], shape (n + 1, n + 1)."""
    values = prefix[marks]
    sums: Floats = values[None, :] - values[:, None]
    return sums
