"""What the paper's formula is told of a plan: replicas split perfectly, nothing is shared.

A stage of r replicas takes the time of R / r rows of a micro-batch of R, whole or not; a transfer
lasts as long as its slowest flow, as if every flow had its links to itself; an AllReduce takes what
its ring takes alone and starts when the stage's backward is done.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable

import numpy as np

from dapple.costs import overlaps
from dapple.planner.grid import choose_marks
from dapple.planner.problem import Problem
from dapple.planner.published import leading_inputs
from dapple.planner.traffic import Devices, Floats, MessageBytes

Pair = tuple[Floats, Floats]


class PaperCosts:
    """Seconds of stages, transfers and AllReduces at n + 1 places where the model may be cut.

    Args:
        problem: what is planned.
        micro_batches: M.
        most: about so many places are looked at, the cheapest cuts.

    Attributes:
        places: shape (n + 1,), layer numbers from 0 to N; inputs stay with the layer behind them.
        rows: of a micro-batch, the batch over M, whole or not.
    """

    def __init__(self, problem: Problem, micro_batches: int, most: int) -> None:
        tables = problem.tables(micro_batches)
        marks, inputs = choose_marks(tables, most), leading_inputs(problem.profile)
        self.places = np.concatenate([[0], marks[marks > inputs]])
        self.rows = problem.global_batch_size / micro_batches
        self._problem, self._tables = problem, tables
        self._origin = np.where(self.places > 0, self.places, inputs)
        self._parameters = tables.layers.parameter_prefix[self.places]
        self._links: dict[Hashable, Pair] = {}
        self.stage = functools.cache(self._stage)
        self.allreduce = functools.cache(self._allreduce)
        self.link = functools.cache(self._link)

    def _stage(self, replicas: int) -> Pair:
        """Prefix sums of F and of B with so many replicas, shape (n + 1,) each."""
        forward, backward = self._tables.layers.layer_seconds(self.rows / replicas)
        return forward[self._origin], backward[self._origin]

    def _link(self, senders: Devices, receivers: Devices) -> Pair:
        """Activations' and gradients' transfer by the place of the cut, shape (n + 1,) each."""
        key = self._problem.symmetry.link_key(senders, receivers)
        found = self._links.get(key)
        if found is None:
            crossing = self._tables.layers.crossing_bytes
            found = self._links[key] = (
                self._transfer(senders, receivers, crossing.forward),
                self._transfer(receivers, senders, crossing.backward),
            )
        return found

    def _transfer(self, senders: Devices, receivers: Devices, size: MessageBytes) -> Floats:
        # Cut into as many equal parts as both sides can share evenly.
        parts = math.lcm(len(senders), len(receivers))
        ways = [(parts // len(side),) * len(side) for side in (senders, receivers)]
        network = self._problem.model.network
        flows = {
            (count, *network.route(senders[a], receivers[b])[:2]) for a, b, count in overlaps(*ways)
        }
        seconds = np.zeros(len(self.places))
        for count, latency, rate in sorted(flows):
            sent = self.rows * count / parts * size.per_row + size.fixed
            flow = np.where(sent > 0, latency + sent / rate, 0.0)[self.places]
            seconds = np.maximum(seconds, flow)
        return seconds

    def _allreduce(self, devices: Devices) -> Floats:
        """Shape (n + 1, n + 1): AllReduce of the stage between two places; 0 without parameters."""
        fixed, rate = self._problem.symmetry.reduce_cost(devices)
        own = self._parameters[None, :] - self._parameters[:, None]
        seconds: Floats = np.where(own > 0, fixed + rate * own, 0.0)
        return seconds
