"""What published planners are told of a model: a chain of places where it may be cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dapple.planner.grid import choose_marks
from dapple.planner.problem import Problem
from dapple.planner.tables import Ints
from dapple.planner.traffic import Floats
from dapple.records import ModelProfile


class LayerCosts(NamedTuple):
    """Some rows on one device, at n + 1 places where the model may be cut.

    Attributes:
        places: shape (n + 1,), layer numbers from 0 to N.
        seconds: shape (n + 1,), prefix sums of forward and backward.
        parameter_bytes: shape (n + 1,), prefix sums.
        activation_bytes: shape (n + 1,), what crosses each cut forward.
        gradient_bytes: shape (n + 1,), what crosses each cut backward.
    """

    places: Ints
    seconds: Floats
    parameter_bytes: Floats
    activation_bytes: Floats
    gradient_bytes: Floats


def layer_costs(problem: Problem, micro_batches: int, most: int) -> LayerCosts:
    """Costs of one micro-batch, the first and largest.

    Inputs are no choice: leading layers without parameters and without backward stay with the
    layer behind them and take no time. PipeDream's and HPGO's imports do the same with nodes
    named "Input"; otherwise half of the devices may be given to reading the input.

    Args:
        problem: what is planned.
        micro_batches: M.
        most: about so many places are looked at, the cheapest cuts.
    """
    tables = problem.tables(micro_batches)
    marks, inputs = choose_marks(tables, most), leading_inputs(problem.profile)
    places = np.concatenate([[0], marks[marks > inputs]])
    forward, backward = tables.layers.layer_seconds(tables.first_rows)
    seconds = forward + backward
    rows, crossing = tables.first_rows, tables.layers.crossing_bytes
    return LayerCosts(
        places,
        np.maximum(seconds[places] - seconds[inputs], 0.0),
        tables.layers.parameter_prefix[places],
        (crossing.forward.per_row * rows + crossing.forward.fixed)[places],
        (crossing.backward.per_row * rows + crossing.backward.fixed)[places],
    )


def leading_inputs(profile: ModelProfile) -> int:
    """How many layers at the start have neither parameters nor backward; N - 1 at most."""
    for number, layer in enumerate(profile.layers):
        if layer.parameter_bytes > 0 or any(layer.backward_seconds):
            return number
    return profile.num_layers - 1
