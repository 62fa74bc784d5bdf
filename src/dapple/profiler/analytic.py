"""A model's profile for a device that is not here: shapes through a roofline, nothing computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dapple.errors import InputError
from dapple.graph import LayerGraph, capture
from dapple.graph.fake import Fakes, weightless
from dapple.profiler.bytes import SavedBytes, Workspace
from dapple.profiler.chain import Chain, Observer
from dapple.profiler.lstm import LibraryLSTM
from dapple.profiler.measured import checked_batch_sizes, tensors_of, tied_of
from dapple.profiler.operators import OperatorSeconds
from dapple.profiler.roofline import Roofline
from dapple.records import LayerProfile, ModelProfile
from dapple.storages import StorageCounter
from dapple.workload import Workload

DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_ADAM_PASSES = 7
"""Adam reads parameter, gradient and two moments, and writes all but the gradient."""

Report = Callable[[str, float], None]


def analytic_profile(
    factory: Callable[[], Workload],
    device: str,
    *,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    dtype: str | None = None,
    finer: bool = False,
    report: Report | None = None,
) -> ModelProfile:
    """What each layer would take and keep on a device, from its shapes.

    Args:
        factory: builds the workload; its parameters never take memory.
        device: a name of `dapple.presets.DEVICES`, such as "v100-16gb".
        batch_sizes: rows, ascending.
        dtype: the type of the model's floating numbers; None: what the device is usually trained in.
        finer: layers are leaf modules.
        report: told (what, fraction done).

    Raises:
        InputError: no such device, or batch sizes that do not ascend from at least 1.
        CaptureError: the model can't be captured without its numbers.
    """
    sizes = checked_batch_sizes(batch_sizes)
    roofline = Roofline(device, dtype)
    with weightless():
        workload = factory()
    graph, fakes, workload = _captured(workload, getattr(torch, roofline.dtype), finer)
    passes = []
    for number, rows in enumerate(sizes):
        if report is not None:
            report(f"batch of {rows}", number / len(sizes))
        with fakes.mode:
            passes.append(_Pass(graph, workload, rows, roofline))
    parameters = [
        [p.nbytes for p in graph.parameters_of(i).values()] for i in range(graph.num_layers)
    ]
    layers = tuple(
        LayerProfile(
            name=name,
            forward_seconds=tuple(_rounded(p.forward[i]) for p in passes),
            backward_seconds=tuple(_rounded(p.backward[i]) for p in passes),
            parameter_bytes=sum(parameters[i]),
            saved_bytes=tuple(p.saved[i] for p in passes),
            workspace_bytes=tuple(p.workspace[i] for p in passes),
            optimizer_seconds=_rounded(roofline.memory(_ADAM_PASSES * sum(parameters[i])))
            if parameters[i]
            else 0.0,
            parameter_sizes=tuple(parameters[i]),
            statistics_bytes=passes[-1].statistics[i],
        )
        for i, name in enumerate(graph.layer_names)
    )
    return ModelProfile(
        model=graph.name,
        device=device,
        dtype=roofline.dtype,
        source="analytic",
        batch_sizes=sizes,
        layers=layers,
        tensors=tensors_of(graph),
        tied=tied_of(graph),
        model_fingerprint=graph.fingerprint,
        notes=graph.notes,
    )


def _captured(
    workload: Workload, dtype: torch.dtype, finer: bool
) -> tuple[LayerGraph, Fakes, Workload]:
    if not isinstance(workload.model, torch.nn.Module):
        raise InputError("a list of layers can't be profiled analytically; pass an nn.Sequential")
    workload.model.to(dtype)
    fakes = Fakes(workload.model)
    targets = workload.targets
    faked = dataclasses.replace(
        workload,
        inputs=lambda rows: fakes.of(_in(dtype, workload.inputs(rows))),
        targets=None if targets is None else lambda rows: fakes.of(_in(dtype, targets(rows))),
    )
    graph = capture(
        workload.model,
        faked.inputs(2),
        loss=workload.loss,
        name=workload.name,
        finer=finer,
        evaluation=False,
        lengths=workload.lengths,
    )
    return graph, fakes, faked


def _in(dtype: torch.dtype, values: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
    )


def _rounded(seconds: float) -> float:
    """Six digits: more would only make files longer."""
    return float(f"{seconds:.5e}")


class _Pass:
    """Seconds and bytes of each layer at one batch size."""

    def __init__(
        self, graph: LayerGraph, workload: Workload, rows: int, roofline: Roofline
    ) -> None:
        chain = Chain(graph, workload, rows, torch.device("cpu"))
        seconds = OperatorSeconds(roofline)
        saved = SavedBytes(chain)
        watch = _Watch(len(chain.layers), seconds, saved)
        with LibraryLSTM(roofline, seconds.charge), seconds:
            chain.run(watch)
        counter = StorageCounter()
        workspace = Workspace(chain, counter)
        with LibraryLSTM(), counter:
            chain.run(workspace)
        chain.clear_gradients()
        self.forward, self.backward = watch.forward_seconds, watch.backward_seconds
        self.statistics = [chain.statistics_bytes(i) for i in range(len(chain.layers))]
        self.saved, self.workspace = saved.bytes, workspace.bytes


class _Watch(Observer):
    """Reads the operators' seconds around each layer, and counts what it saves."""

    def __init__(self, layers: int, seconds: OperatorSeconds, saved: SavedBytes) -> None:
        self.forward_seconds = [0.0] * layers
        self.backward_seconds = [0.0] * layers
        self._seconds = seconds
        self._saved = saved

    def made(self, layer: int, tensor: torch.Tensor) -> None:
        """Pass it on."""
        self._saved.made(layer, tensor)

    def forward(self, layer: int, run: Callable[[], Any]) -> Any:
        """Seconds and savings of a forward."""
        self._seconds.taken()
        result = self._saved.forward(layer, run)
        self.forward_seconds[layer] = self._seconds.taken()
        return result

    def backward(self, layer: int, incoming_bytes: int, run: Callable[[], Any]) -> Any:
        """Seconds of a backward."""
        self._seconds.taken()
        result = run()
        self.backward_seconds[layer] = self._seconds.taken()
        return result
