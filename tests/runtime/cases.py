"""Models, plans and a single-process reference that plans are held against, in float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from dapple.cluster import Cluster, DeviceKind, Link, Machines
from dapple.graph import LayerGraph, capture
from dapple.records import Plan, StagePlan
from dapple.runtime.trainer import Trainer
from dapple.schedule import warmup_counts
from dapple.zoo.gpt import GPT, next_byte_loss, unmasked_tokens
from dapple.zoo.skip import SkipNet

TOLERANCE = 1e-10


@dataclasses.dataclass(frozen=True)
class Run:
    """A plan and what is trained with it.

    Attributes:
        model: a key of `EXAMPLES`.
        replicas: per stage the number of replicas.
        num_micro_batches: M of the plan.
        rows: the global batch size that the plan is made for.
        step_rows: the global batch size of each step.
        optimizer: a key of `OPTIMIZERS`.
        schedule: the plan's schedule.
        split, policy: how the layers are cut and how deep stages warm up, see `make_plan`.
        shares: per stage the shares of its replicas in the rows; None: even.
        shard: what every stage's replicas share out.
        virtual: stages per device.
    """

    model: str
    replicas: tuple[int, ...]
    num_micro_batches: int = 2
    rows: int = 12
    step_rows: tuple[int, ...] = ()
    optimizer: str = "adamw"
    schedule: str = "early-backward"
    split: str = "even"
    policy: str = "A"
    shares: tuple[tuple[float, ...] | None, ...] = ()
    shard: Literal["none", "optimizer"] = "none"
    virtual: int = 1

    @property
    def all_rows(self) -> tuple[int, ...]:
        """The batch size of each step: three of the plan's unless told."""
        return self.step_rows or (self.rows,) * 3


class LossInside(nn.Module):
    """Returns its own loss, a mean over the rows, in a dict."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)]
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class PlainMLP(nn.Module):
    """Six layers; in-place activations."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)) for _ in range(5)],
            nn.Linear(width, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Beside(nn.Module):
    """Hands on a second tensor past all cuts, and one without rows, that the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.shift = nn.Linear(6, 4), nn.Linear(4, 4, bias=False)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        side, shift = self.side(x), self.shift.weight.sum(0)
        return self.head(self.layers(x)), torch.sin(side) + shift


def first_squared_error(
    output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor
) -> torch.Tensor:
    return squared_error(output[0], target)


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


@dataclasses.dataclass(frozen=True)
class Example:
    """A model with batches to train it on."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, Any]]
    loss: Any = None
    weight: Any = None


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def _mlp_batch(rows: int, step: int) -> tuple[Any, Any]:
    g = _generator(step)
    x = torch.randn(rows, 6, generator=g, dtype=torch.float64)
    return x, torch.randn(rows, 4, generator=g, dtype=torch.float64)


def _inside_batch(rows: int, step: int) -> tuple[Any, Any]:
    g = _generator(step)
    x = torch.randn(rows, 6, generator=g, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 3, (rows,), generator=g)}, None


def _skip_batch(rows: int, step: int) -> tuple[Any, Any]:
    g = _generator(step)
    x = torch.randn(rows, 8, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, 9, (rows,), generator=g)
    return (x, lengths), torch.randn(rows, 8, generator=g, dtype=torch.float64)


def _gpt_batch(rows: int, step: int) -> tuple[Any, Any]:
    g = _generator(step)
    tokens = torch.randint(0, 16, (rows, 7), generator=g)
    targets = torch.randint(0, 16, (rows, 7), generator=g)
    # Unequal numbers of unmasked tokens per row, and a run of rows without any.
    keep = torch.arange(7)[None, :] < torch.randint(1, 8, (rows, 1), generator=g)
    targets[~keep] = -100
    targets[: max(0, rows // 3)] = -100
    return tokens, targets


def _gpt() -> nn.Module:
    return GPT(vocab=16, width=8, layers=4, heads=2, context=7)


EXAMPLES = {
    "mlp": Example(PlainMLP, _mlp_batch, squared_error),
    "inside": Example(LossInside, _inside_batch),
    "skip": Example(lambda: SkipNet(width=8, layers=6), _skip_batch, squared_error),
    "beside": Example(Beside, _mlp_batch, first_squared_error),
    "gpt": Example(_gpt, _gpt_batch, next_byte_loss, unmasked_tokens),
}


def make_model(name: str, seed: int = 7) -> nn.Module:
    """The named model in float64, with weights that depend on the seed only."""
    torch.manual_seed(seed)
    return EXAMPLES[name].model().double()


@functools.cache
def build(name: str, seed: int = 7, evaluation: bool = True) -> LayerGraph:
    """The capture of the named model."""
    example = EXAMPLES[name]
    return capture(
        make_model(name, seed),
        example.batch(4, 0)[0],
        loss=example.loss,
        name=name,
        evaluation=evaluation,
    )


def make_plan(
    graph: LayerGraph,
    replicas: Sequence[int],
    rows: int,
    num_micro_batches: int,
    schedule: str = "early-backward",
    split: str = "even",
    policy: str = "A",
    shares: Sequence[tuple[float, ...] | None] = (),
    shard: Literal["none", "optimizer"] = "none",
    virtual: int = 1,
    **changes: Any,
) -> Plan:
    """A plan for stages with these replica counts.

    Args:
        split: "even": stages of as many layers each. "early": two layers, then one each, and all
            the rest, so that the skip of the skip net passes over a stage in the middle.
        policy: of warm-up, see `warmup_counts`.
        shares: of each stage's replicas in the rows; none: even.
        shard: what every stage's replicas share out.
        virtual: stages per device; the devices' row is gone through so many times.
    """
    devices = sum(replicas)
    starts = [0, *itertools.accumulate(replicas)]
    count = virtual * len(replicas)
    warmup = warmup_counts(count, num_micro_batches, policy)
    cuts = [round(i * graph.num_layers / count) for i in range(count + 1)]
    if split == "early":
        cuts = [0, *range(2, count + 1), graph.num_layers]
    stages = [
        StagePlan(
            start=cuts[s],
            stop=cuts[s + 1],
            devices=tuple(range(*starts[s % len(replicas) : s % len(replicas) + 2])),
            warmup=warmup[s],
            rows=shares[s % len(replicas)] if shares else None,
            shard=shard,
        )
        for s in range(count)
    ]
    kind = DeviceKind(name="test", memory=2**30)
    machines = Machines(devices=devices, kind=kind, inside=Link(bandwidth=1e9))
    return Plan(
        model=graph.name,
        global_batch_size=rows,
        micro_batch_size=-(-rows // num_micro_batches),
        num_micro_batches=num_micro_batches,
        schedule=schedule,
        virtual=virtual,
        stages=tuple(stages),
        cluster=Cluster(name="test", machines=(machines,)),
        **changes,
    )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


DECAYED = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
"""Those that move a parameter whose gradient is zeros rather than none."""


@functools.cache
def reference(name: str, all_rows: tuple[int, ...], optimizer: str) -> tuple[Any, list[float]]:
    """Parameters and losses of one process that takes each step's global batch whole."""
    example = EXAMPLES[name]
    model = make_model(name)
    update = OPTIMIZERS[optimizer](list(model.parameters()))
    losses = []
    for step, rows in enumerate(all_rows):
        inputs, targets = example.batch(rows, step)
        update.zero_grad()
        if isinstance(inputs, dict):
            output = model(**inputs)
        else:
            output = model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
        loss = output["loss"] if example.loss is None else example.loss(output, targets)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return {n: p.detach() for n, p in model.state_dict().items()}, losses


def make_trainer(graph: Any, run: Run, **trainer_arguments: Any) -> Trainer:
    """One rank's trainer for a run."""
    return Trainer(
        graph,
        make_plan(
            graph,
            run.replicas,
            run.rows,
            run.num_micro_batches,
            run.schedule,
            run.split,
            run.policy,
            run.shares,
            run.shard,
            run.virtual,
        ),
        OPTIMIZERS[run.optimizer],
        weight=EXAMPLES[run.model].weight,
        device=torch.device("cpu"),
        record=False,
        **trainer_arguments,
    )


def train(
    graph: Any, run: Run, **trainer_arguments: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One rank's parameters and losses after the steps of a run."""
    trainer = make_trainer(graph, run, **trainer_arguments)
    batch = EXAMPLES[run.model].batch
    losses = [trainer.step(*batch(rows, step)).loss for step, rows in enumerate(run.all_rows)]
    return {n: v.clone() for n, v in trainer.state_dict().items()}, losses


def error(run: Run, results: Sequence[tuple[dict[str, torch.Tensor], list[float]]]) -> float:
    """How far the ranks are from one process: of parameters and losses, the larger error."""
    wanted, losses = reference(run.model, run.all_rows, run.optimizer)
    largest = max(abs(loss) for loss in losses)
    of_losses = max(abs(a - b) for _, found in results for a, b in zip(found, losses, strict=True))
    return max(global_error([state for state, _ in results], wanted), of_losses / largest)


def global_error(
    ranks: Sequence[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]
) -> float:
    """Largest difference of any parameter on any rank, over the largest parameter."""
    found: set[str] = set()
    worst = 0.0
    for state in ranks:
        found |= set(state)
        worst = max([worst, *((v - wanted[n]).abs().max().item() for n, v in state.items())])
    assert found == set(wanted), f"missing: {sorted(set(wanted) - found)}"
    return worst / max(v.abs().max().item() for v in wanted.values())
