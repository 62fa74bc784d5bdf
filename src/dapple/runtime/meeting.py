"""What the ranks compare when they meet at the start of a call, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from dapple.graph import LayerGraph
from dapple.runtime.agreement import check_same, check_updates, check_weights
from dapple.runtime.freezing import Freezing, Shared
from dapple.runtime.layout import Layout
from dapple.runtime.parts import Parts
from dapple.runtime.topology import Topology
from dapple.runtime.transport import Transport
from dapple.runtime.watch import ActionLog


class Meeting:
    """Where the ranks meet; each makes one, and all call its methods together.

    Args:
        graph: the captured model, before `parts` has freed the others'.
        names: of all its parameters.
        parts: this rank's stages.
        topology: this rank's place.
        tied: for each tied parameter of this rank the ranks of all its holders.
        told: what else has to be the same everywhere, in words, by name.
        transport: the network.
        device: this rank's device.
        progress: where this rank notes what it does.
    """

    def __init__(
        self,
        graph: LayerGraph,
        names: Sequence[str],
        parts: Parts,
        topology: Topology,
        tied: Mapping[str, tuple[int, ...]],
        told: Mapping[str, str],
        transport: Transport,
        device: torch.device,
        progress: ActionLog,
    ) -> None:
        self._names = names
        self._tied = tied
        self._told = told
        self._transport = transport
        self._device = device
        self._progress = progress
        trainable = parts.trainable()
        self._freezing = Freezing(
            trainable,
            parts.frozen(),
            topology.position,
            len(topology.plan.positions),
            tied,
            [group[0][1] for group in graph.tied],
        )
        self._ranks = topology.ranks[topology.stage]
        self._unchecked: dict[str, nn.Parameter] | None = trainable
        self._has_stepped = False

    def before(self, layout: Layout, call: str) -> None:
        """Before a call that updates nothing.

        Raises:
            InputError: as `check_same`, and at the first meeting as `check_weights`.
        """
        self._compare(layout, call, ())

    def before_step(self, layout: Layout, call: str, writes: bool) -> None:
        """Before a step.

        Args:
            layout: its rows.
            call: the call in words.
            writes: this rank has something to update.

        Raises:
            InputError: as `before`, as `Freezing` and, at the first step, as `check_updates`.
        """
        self._freezing.check_thawed()
        self._compare(layout, call, self._freezing.shared())
        if not self._has_stepped:
            check_updates(writes, self._transport, self._device)
            self._has_stepped = True

    def _compare(self, layout: Layout, call: str, shared: Sequence[Shared]) -> None:
        self._progress.set("barrier", None)
        told = {**self._told, "the call": call}
        groups = self._freezing.num_groups
        if not check_same(layout, told, self._transport, self._device, shared, groups):
            self._freezing.refuse(self._names, self._transport, self._device)
        if self._unchecked is not None:
            check_weights(self._unchecked, self._ranks, self._tied, self._transport)
            self._unchecked = None
