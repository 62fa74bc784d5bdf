"""Bytes of each layer: activations that autograd saves, and the workspace around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dapple.profiler.chain import Chain, Observer
from dapple.storages import StorageCounter


class SavedBytes(Observer):
    """Counts the storages that autograd saves in the forward of each layer.

    Parameters, buffers and the batch don't count. A tensor between layers counts at its producer,
    whoever saves it, so that a stage's bytes are the sum over its layers; what a stage receives
    is counted apart.
    """

    def __init__(self, chain: Chain) -> None:
        self.bytes = [0] * len(chain.layers)
        self.cast_bytes = [0] * len(chain.layers)
        self._casts = chain.precision.name != "float32"
        self._ignored = chain.input_storages()
        for layer in chain.layers:
            for tensor in (*layer.module.parameters(), *layer.module.buffers()):
                self._ignored.add(tensor.untyped_storage()._cdata)
        self._producer: dict[int, int] = {}
        self._counted: set[int] = set()
        # Holding what is saved keeps addresses from being used twice.
        self._held: list[torch.Tensor] = []

    def made(self, layer: int, tensor: torch.Tensor) -> None:
        """A tensor between layers belongs to the layer that made it."""
        self._producer.setdefault(tensor.untyped_storage()._cdata, layer)
        self._held.append(tensor.detach())

    def forward(self, layer: int, run: Callable[[], Any]) -> Any:
        """Watch what a layer saves."""
        if self._casts:
            self._find_casts(layer, run)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self._count(layer, tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return run()

    def _find_casts(self, layer: int, run: Callable[[], Any]) -> None:
        """Weights that autocast casts once per step: two forwards save the same storage of these."""
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            return tensor

        passes = []
        for _ in range(2):
            first = len(saved)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                run()
            storages = (t.untyped_storage() for t in saved[first:])
            passes.append({s._cdata: s for s in storages})
        given = self._ignored | self._counted | self._producer.keys()
        for address in passes[0].keys() & passes[1].keys() - given:
            storage = passes[0][address]
            self.cast_bytes[layer] += storage.nbytes()
            self._ignored.add(address)
        self._held += saved

    def _count(self, layer: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._ignored or address in self._counted or not storage.nbytes():
            return
        self._counted.add(address)
        self._held.append(tensor.detach())
        self.bytes[self._producer.get(address, layer)] += storage.nbytes()


class Workspace(Observer):
    """Most bytes alive for a moment inside a layer, beyond what it saves and was given.

    In the backward the output's gradient counts as workspace, except what a stage receives.
    """

    def __init__(self, chain: Chain, counter: StorageCounter) -> None:
        self.bytes = [0] * len(chain.layers)
        self._counter = counter

    def forward(self, layer: int, run: Callable[[], Any]) -> Any:
        """Peak of a forward over what it leaves behind."""
        self._counter.reset_peak()
        made = run()
        self._raise(layer, self._counter.peak_bytes - self._counter.live_bytes)
        return made

    def backward(self, layer: int, incoming_bytes: int, run: Callable[[], Any]) -> Any:
        """Peak of a backward over what was alive before it."""
        self._counter.reset_peak()
        before = self._counter.live_bytes - incoming_bytes
        result = run()
        self._raise(layer, self._counter.peak_bytes - before)
        return result

    def _raise(self, layer: int, count: int) -> None:
        self.bytes[layer] = max(self.bytes[layer], count)


def measure_bytes(chain: Chain) -> tuple[list[int], list[int], list[int]]:
    """Saved, workspace and cast bytes of each layer, at the chain's batch size."""
    saved = SavedBytes(chain)
    chain.run(saved)
    # The second pass has gradients already, as all micro-batches but the first have.
    counter = StorageCounter()
    workspace = Workspace(chain, counter)
    with counter:
        chain.run(workspace)
    return saved.bytes, workspace.bytes, saved.cast_bytes
