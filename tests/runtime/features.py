"""Few runs that bring every two features of training together, held against one process in float64.

The models of the other parity tests, and BERT and a ResNet as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dapple.graph import LayerGraph
from dapple.records import Plan
from dapple.runtime.trainer import Trainer
from tests.graph import checks
from tests.runtime import cases, library, test_library
from tests.runtime.pairwise import Choice, pairwise
from tests.runtime.threads import TrainingOnly, run_threads

ROWS = 7
# Of the plan's size, then of another one.
STEP_ROWS = (ROWS, 4)
LIMIT = 0.05

FACTORS: dict[str, Any] = {
    # "gpt": tied weights, pieces without weight. "skip": skips over stages, a bool. "inside":
    # the model returns its loss. "mlp": in place. "bert-masked": the library's, tied, keywords.
    # "resnet": batch norm over replicas, in place.
    "model": ["mlp", "gpt", "skip", "inside", "bert-masked", "resnet"],
    # Schedule, warm-up policy, stages per device.
    "schedule": [
        ("early-backward", "A", 1),
        ("early-backward", "B", 1),
        ("zero-bubble", "A", 1),
        ("zero-bubble", "B", 1),
        ("interleaved", "A", 2),
        ("gpipe", "A", 2),
    ],
    "replicas": [(2, 1, 2), (1, 3), (3, 2), (1, 1, 1)],
    "num_micro_batches": [1, 3, 5],
    "recompute": ["nothing", "stages", "first layers"],
    "shares": ["even", "proportional"],
    "shard": ["none", "optimizer"],
    # p of the norm that gradients are clipped by.
    "norm": [None, 2.0, float("inf")],
    "calls": ["an update each", "one update for two"],
    "rows": ["whole batches", "own rows"],
}


@dataclasses.dataclass(frozen=True)
class Features:
    """One value of each of `FACTORS`."""

    model: str
    schedule: tuple[str, str, int]
    replicas: tuple[int, ...]
    num_micro_batches: int
    recompute: str
    shares: str
    shard: Any
    norm: float | None
    calls: str
    rows: str

    @property
    def updates(self) -> tuple[bool, ...]:
        """Whether each call updates."""
        return (True, True) if self.calls == "an update each" else (False, True)


def refused(one: Choice, other: Choice) -> bool:
    """Two choices that the runtime refuses by name, see test_refusals.py."""
    (_, schedule), (name, value) = one, other
    return name == "shard" and value == "optimizer" and one[0] == "schedule" and schedule[2] > 1  # type: ignore[index]


RUNS = [Features(**row) for row in pairwise(FACTORS, refused)]  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class _Model:
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, Any]]
    loss: Any
    weight: Any


def _model(name: str) -> _Model:
    if name in library.MODELS:
        found = library.MODELS[name]
        return _Model(found.make, found.batch, found.loss, found.weight)
    example = cases.EXAMPLES[name]
    return _Model(lambda: cases.make_model(name), example.batch, example.loss, example.weight)


def graph_of(name: str) -> LayerGraph:
    """The capture of a model, made once."""
    return test_library.captured(name) if name in library.MODELS else cases.build(name)


def plan_of(run: Features) -> Plan:
    """The plan that has the features."""
    schedule, policy, virtual = run.schedule
    shares = [tuple(1.0 + 2 * r for r in range(n)) for n in run.replicas]
    plan = cases.make_plan(
        graph_of(run.model),
        run.replicas,
        ROWS,
        run.num_micro_batches,
        schedule,
        policy=policy,
        virtual=virtual,
        shares=shares if run.shares == "proportional" else (),
        shard=run.shard,
    )
    again: dict[str, Callable[[int, int], Any]] = {
        "nothing": lambda start, stop: False,
        "stages": lambda start, stop: True,
        "first layers": lambda start, stop: ((start, start + 1),),
    }
    stages = [
        stage.model_copy(update={"recompute": again[run.recompute](stage.start, stage.stop)})
        for stage in plan.stages
    ]
    return plan.model_copy(update={"stages": tuple(stages)})


def _descend(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@functools.cache
def reference(
    name: str, micro_batches: tuple[int, ...], norm: float | None, updates: tuple[bool, ...]
) -> tuple[dict[str, Tensor], list[float]]:
    """State and losses of one process: the ResNet takes micro-batch after micro-batch."""
    model = _model(name)
    module = model.make()
    optimizer = _descend(module.parameters())
    losses = []
    for step, (rows, count, update) in enumerate(
        zip(STEP_ROWS, micro_batches, updates, strict=True)
    ):
        inputs, targets = model.batch(rows, step)
        pieces = [(inputs, targets)]
        if name == "resnet":
            cut = inputs.tensor_split(count), targets.tensor_split(count)
            pieces = list(zip(*cut, strict=True))
        total = 0.0
        for x, y in pieces:
            output = checks.call(module, x)
            loss = output["loss"] if model.loss is None else model.loss(output, y)
            share = loss * (len(x) / rows if name == "resnet" else 1.0)
            share.backward()
            total += share.item()
        losses.append(total)
        if update:
            if norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), LIMIT, norm)
            optimizer.step()
            optimizer.zero_grad()
    return {n: v.detach() for n, v in module.state_dict().items()}, losses


def train(run: Features, plan: Plan, transport: Any) -> tuple[dict[str, Tensor], list[float]]:
    """State and losses of one rank."""
    model = _model(run.model)
    trainer = Trainer(
        TrainingOnly(graph_of(run.model)),  # type: ignore[arg-type]
        plan,
        _descend,
        weight=model.weight,
        clip_norm=None if run.norm is None else LIMIT,
        norm_type=run.norm or 2.0,
        transport=transport,
        device=torch.device("cpu"),
        record=False,
    )
    losses = []
    for step, (rows, update) in enumerate(zip(STEP_ROWS, run.updates, strict=True)):
        inputs, targets = model.batch(rows, step)
        size = None
        if run.rows == "own rows":
            size = rows
            inputs, targets = _taken(trainer.own_rows(rows), (inputs, targets))
        losses.append(trainer.step(inputs, targets, update=update, global_batch_size=size).loss)
    return {n: v.clone() for n, v in trainer.state_dict().items()}, losses


def _taken(rows: list[int], values: Any) -> Any:
    return tree_map(lambda value: value if value is None else value[rows], values)


def error(run: Features) -> float:
    """How far the ranks, as threads, are from one process, in weights, buffers and losses."""
    plan = plan_of(run)
    results = run_threads(plan.num_devices, functools.partial(train, run, plan))
    micro_batches = (run.num_micro_batches, -(-STEP_ROWS[1] // plan.micro_batch_size))
    if run.model != "resnet":
        micro_batches = (1, 1)
    wanted, losses = reference(run.model, micro_batches, run.norm, run.updates)
    of_losses = max(abs(a - b) for _, found in results for a, b in zip(found, losses, strict=True))
    of_states = cases.global_error([state for state, _ in results], wanted)
    return max(of_states, of_losses / max(losses))


def row_of(run: Features) -> dict[str, Hashable]:
    """The run as a choice of each factor."""
    return dataclasses.asdict(run)
