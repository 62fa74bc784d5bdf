"""A model's profile, measured on this machine while as many processes as will run are busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dapple.errors import InputError
from dapple.graph import LayerGraph
from dapple.graph.precision import Precision, PrecisionName
from dapple.profiler.bytes import measure_bytes
from dapple.profiler.chain import Chain, ChainPass
from dapple.records import (
    LayerProfile,
    ModelProfile,
    TensorProfile,
    TiedGroup,
    TiedMember,
)
from dapple.workload import Workload

DEFAULT_BATCH_SIZES = (1, 2, 4, 8)
DEFAULT_ROUNDS = 7

Report = Callable[[str, float], None]


def measure_profile(
    graph: LayerGraph,
    workload: Workload,
    *,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    rounds: int = DEFAULT_ROUNDS,
    device: torch.device | None = None,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    precision: PrecisionName = "float32",
    report: Report | None = None,
) -> ModelProfile:
    """Measure every layer's forward, backward, optimizer update and bytes.

    In a process group all ranks measure at the same time and their medians are averaged, so that
    times are those of a machine that is as busy as it will be in training. Every rank calls it and
    gets the same profile.

    Args:
        graph: the captured model.
        workload: the model's example batches and loss.
        batch_sizes: rows to measure, ascending.
        rounds: passes per batch size; the median counts. One more goes first to warm up.
        device: where to measure; the CPU by default.
        optimizer: whose update is timed; AdamW by default.
        precision: "float32" computes in the model's own types, "bf16" and "fp16" under autocast.
        report: told (what, fraction done).

    Raises:
        InputError: batch sizes that do not ascend from at least 1.
    """
    sizes = checked_batch_sizes(batch_sizes)
    where = device or torch.device("cpu")
    types = Precision(precision, where)
    passes: list[ChainPass] = []
    saved: list[list[int]] = []
    workspace: list[list[int]] = []
    for number, rows in enumerate(sizes):
        if report is not None:
            report(f"batch of {rows}", number / len(sizes))
        chain = Chain(graph, workload, rows, where, types)
        # Weights are the same for any number of rows, and so are their casts.
        kept, worked, casts = measure_bytes(chain)
        saved.append(kept)
        workspace.append(worked)
        passes.append(_median_pass(chain, rounds))
        chain.clear_gradients()
    updates = _optimizer_seconds(graph, optimizer or torch.optim.AdamW, rounds)
    passes, updates = _averaged(passes, updates)
    if report is not None:
        report("done", 1.0)
    layers = tuple(
        LayerProfile(
            name=name,
            forward_seconds=tuple(p.forward_seconds[i] for p in passes),
            backward_seconds=tuple(p.backward_seconds[i] for p in passes),
            parameter_bytes=sum(p.nbytes for p in graph.parameters_of(i).values()),
            saved_bytes=tuple(row[i] for row in saved),
            workspace_bytes=tuple(row[i] for row in workspace),
            cast_bytes=casts[i],
            optimizer_seconds=updates[i],
            parameter_sizes=tuple(p.nbytes for p in graph.parameters_of(i).values()),
            statistics_bytes=chain.statistics_bytes(i),
        )
        for i, name in enumerate(graph.layer_names)
    )
    return ModelProfile(
        model=graph.name,
        device=where.type,
        dtype=_dtype(graph) if precision == "float32" else f"{_dtype(graph)}, autocast {precision}",
        source="measured",
        batch_sizes=sizes,
        layers=layers,
        tensors=tensors_of(graph, types),
        tied=tied_of(graph),
        concurrency=dist.get_world_size() if dist.is_initialized() else 1,
        model_fingerprint=graph.fingerprint,
        notes=graph.notes,
    )


def checked_batch_sizes(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """The batch sizes as a profile has them.

    Raises:
        InputError: they don't ascend from at least 1.
    """
    sizes = tuple(batch_sizes)
    if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise InputError(
            f"batch sizes {list(sizes)} must ascend from at least 1; pass something like 1,2,4"
        )
    return sizes


def _median_pass(chain: Chain, rounds: int) -> ChainPass:
    found = []
    # As in a step of many micro-batches, weights are cast once.
    with chain.precision.step():
        chain.run()
        for _ in range(rounds):
            if dist.is_initialized():
                # Everybody busy with the same thing at the same time.
                dist.barrier()
            found.append(chain.run())
    layers = range(len(chain.layers))
    return ChainPass(
        [statistics.median(p.forward_seconds[i] for p in found) for i in layers],
        [statistics.median(p.backward_seconds[i] for p in found) for i in layers],
    )


def _optimizer_seconds(
    graph: LayerGraph,
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    rounds: int,
) -> list[float]:
    seconds = []
    for layer in range(graph.num_layers):
        # On copies, so that the model is as it was.
        copies = [
            torch.nn.Parameter(p.detach().clone())
            for p in graph.parameters_of(layer).values()
            if p.requires_grad
        ]
        if not copies:
            seconds.append(0.0)
            continue
        optimizer = make(copies)
        for parameter in copies:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - begin)
        seconds.append(statistics.median(times))
    return seconds


def _averaged(passes: list[ChainPass], updates: list[float]) -> tuple[list[ChainPass], list[float]]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return passes, updates
    table = [row for p in passes for row in (p.forward_seconds, p.backward_seconds)] + [updates]
    times = torch.tensor(table, dtype=torch.float64)
    dist.all_reduce(times)
    rows: list[list[float]] = (times / dist.get_world_size()).tolist()
    averaged = [ChainPass(rows[2 * i], rows[2 * i + 1]) for i in range(len(passes))]
    return averaged, rows[-1]


def tensors_of(graph: LayerGraph, precision: Precision | None = None) -> tuple[TensorProfile, ...]:
    """The tensors between layers, as a profile has them."""
    tensors = graph.tensors()
    if precision is not None:
        tensors = precision.typed(graph, tensors)
    return tuple(
        TensorProfile(
            name=tensor.name,
            producer=tensor.producer,
            consumers=tensor.consumers,
            bytes_per_sample=float(tensor.bytes_per_row) if tensor.row_dim is not None else 0.0,
            fixed_bytes=0.0 if tensor.row_dim is not None else float(tensor.bytes_per_row),
            needs_grad=tensor.needs_grad,
        )
        for tensor in tensors
    )


def tied_of(graph: LayerGraph) -> tuple[TiedGroup, ...]:
    """The tied parameters, as a profile has them."""
    sizes = {name: p.nbytes for name, p in graph.parameters().items()}
    return tuple(
        TiedGroup(
            parameter_bytes=sizes[group[0][1]],
            members=tuple(TiedMember(layer=layer, parameter=name) for layer, name in group),
        )
        for group in graph.tied
    )


def _dtype(graph: LayerGraph) -> str:
    kinds: list[Any] = [p.dtype for p in graph.parameters().values()]
    return str(kinds[0]).removeprefix("torch.") if kinds else "float32"
