"""What is to be planned, and the two judges of a layout: memory and the simulator."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property

from dapple.cluster import Cluster
from dapple.costs import CostModel, update_seconds
from dapple.planner.bank import Bank
from dapple.planner.batches import check_batch, check_known, even_counts, geometric_counts
from dapple.planner.layers import LayerTables
from dapple.planner.layout import WIDE, Layout, leaner
from dapple.planner.memory import OPTIMIZER_STATE, Memory
from dapple.planner.refusal import Refusal
from dapple.planner.symmetry import Symmetry
from dapple.planner.tables import CostTables
from dapple.planner.warmup import falling_counts
from dapple.records import MOST_MICRO_BATCHES, ModelProfile, Plan, StagePlan
from dapple.schedule import SCHEDULES, Room, Schedule, warmup_counts
from dapple.simulator import step_seconds


class Problem:
    """A profile, a cluster and a global batch, with everything that is cached about them.

    Args:
        profile: the model's costs.
        cluster: the devices.
        global_batch_size: rows of a step.
        micro_batch_size: rows of a micro-batch; None: the planner chooses.
        optimizer: one of `OPTIMIZER_STATE`.
        schedule: one of `dapple.schedule.SCHEDULES`.
        warmup: "A", "B" or "tuned"; None: whichever is best.
        recompute: stages may run their forwards again where memory is short.
        shard: replicas may share out their optimizer's state.
        network_model: "shared" or "paper"; None: the cluster's.
        proportional: replicas of different speed have rows in proportion to it.

    Raises:
        InputError: a batch size below 1, or an unknown optimizer, schedule or network model.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        global_batch_size: int,
        *,
        micro_batch_size: int | None = None,
        optimizer: str = "adamw",
        schedule: str = "early-backward",
        network_model: str | None = None,
        warmup: str | None = None,
        recompute: bool = False,
        shard: bool = False,
        proportional: bool = False,
    ) -> None:
        if warmup is not None:
            check_known("warm-up policy", warmup, ("A", "B", "tuned"))
        check_batch(global_batch_size, micro_batch_size)
        check_known("optimizer", optimizer, OPTIMIZER_STATE)
        check_known("schedule", schedule, SCHEDULES[:2])
        self.profile = profile
        self.cluster = cluster
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.optimizer = optimizer
        self.schedule = schedule
        self.warmup = warmup
        self.recompute = recompute
        self.shard = shard
        self.proportional = proportional
        self.model = CostModel(profile, cluster, network_model)
        self.machine_sizes = cluster.machine_sizes()
        self.machine_of_device = cluster.machine_of_device()
        self._kinds = cluster.kind_of_device()
        self.symmetry = Symmetry(cluster, self.model.network)
        self._memory = Memory(self.model, self.symmetry, global_batch_size, optimizer)
        self._tables: dict[int, CostTables] = {}
        self._banks: dict[int, Bank] = {}
        self._step_seconds: dict[tuple[tuple[StagePlan, ...], int], float] = {}

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Of the devices."""
        return tuple(kind.speed for kind in self._kinds)

    @property
    def speeds_differ(self) -> bool:
        """Whether the cluster has devices of different speed."""
        return len(set(self.speeds)) > 1

    @cached_property
    def most_memory(self) -> int:
        """Bytes of the largest device."""
        return max(kind.memory for kind in self._kinds)

    def with_proportional_rows(self) -> Problem:
        """The same, but replicas of different speed have rows in proportion to it."""
        return Problem(
            self.profile,
            self.cluster,
            self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            optimizer=self.optimizer,
            schedule=self.schedule,
            network_model=self.model.network.model,
            warmup=self.warmup,
            recompute=self.recompute,
            shard=self.shard,
            proportional=True,
        )

    @property
    def num_layers(self) -> int:
        """N."""
        return self.profile.num_layers

    @property
    def num_devices(self) -> int:
        """G."""
        return self.cluster.num_devices

    @cached_property
    def micro_batch_counts(self) -> tuple[int, ...]:
        """The values of M that are looked at, ascending."""
        if self.micro_batch_size is not None:
            return (math.ceil(self.global_batch_size / self.micro_batch_size),)
        batch = self.global_batch_size
        counts = {*geometric_counts(batch)}
        for replicas in {self.num_devices, *self.machine_sizes}:
            counts.update(even_counts(batch, replicas))
        return tuple(sorted(count for count in counts if count <= MOST_MICRO_BATCHES))

    @cached_property
    def memory_is_known(self) -> bool:
        """Whether the profile says what every layer keeps for its backward."""
        return all(layer.saved_bytes is not None for layer in self.profile.layers)

    @cached_property
    def refuses_rightly(self) -> bool:
        """Whether what `guess_warmup` refuses does not fit indeed: it counts nothing too often.

        It does count tensors that skip layers, and tied parameters, in more than one place, and
        all activations where a stage may recompute them.
        """
        skips = any(max(t.consumers, default=0) > t.producer + 1 for t in self.profile.tensors)
        return not (skips or self.profile.tied or self.recompute)

    def variants(self, layout: Layout) -> list[Layout]:
        """The layout with every warm-up policy, recomputation and shards where allowed."""
        known, replicated = self.memory_is_known, any(len(d) > 1 for d in layout.devices)
        again = [False, True] if self.recompute and known else [False]
        shared = [False, True] if self.shard and replicated else [False]
        return [
            replace(layout, policy=policy, recompute=r, shard=s)
            for r, s, policy in itertools.product(again, shared, self.policies(layout))
        ]

    def policies(self, layout: Layout) -> list[str]:
        """The warm-up policies to choose from; one where they are the same.

        Where memory is enough, `WIDE` contains policy B, and tuning finds the counts in between.
        """
        policies = [self.warmup] if self.warmup in ("A", "B") else ["A", WIDE]
        alike = layout.num_stages == 1 or layout.micro_batches == 1 or self.schedule == "gpipe"
        return policies[:1] if alike else policies

    @property
    def tunes_warmup(self) -> bool:
        """Whether warm-up counts beside the policies' are looked for."""
        return self.warmup in (None, "tuned") and self.schedule != "gpipe"

    @property
    def optimizer_state_factor(self) -> float:
        """Bytes of optimizer state per byte of parameters."""
        return OPTIMIZER_STATE[self.optimizer]

    def state_factor(self, replicas: int, shard: bool) -> float:
        """About the same of one of so many replicas, which share it out or not."""
        return self.optimizer_state_factor / (replicas if shard else 1)

    @cached_property
    def layer_tables(self) -> LayerTables:
        """What does not depend on M: times and bytes of layers at some rows."""
        return LayerTables(self.profile)

    @cached_property
    def least_rings(self) -> dict[int, list[tuple[float, float]]]:
        """What `dapple.planner.relaxed.least_rings` found, by the number of replicas."""
        return {}

    @cached_property
    def better_cuts(self) -> dict[Hashable, list[tuple[float, Layout]]]:
        """What `dapple.planner.cuts` found, by layouts and moves."""
        return {}

    def tables(self, micro_batches: int) -> CostTables:
        """Stage and transfer times for M micro-batches."""
        found = self._tables.get(micro_batches)
        if found is None:
            found = CostTables(
                self.layer_tables,
                self.model.network,
                self.symmetry,
                self.global_batch_size,
                micro_batches,
                self.proportional,
            )
            self._tables[micro_batches] = found
        return found

    def bank(self, micro_batches: int) -> Bank:
        """The same by number, for many layouts at once."""
        found = self._banks.get(micro_batches)
        if found is None:
            found = self._banks[micro_batches] = Bank(self.tables(micro_batches), self.symmetry)
        return found

    def fit(self, layout: Layout, name: str) -> tuple[StagePlan, ...] | Refusal:
        """Warm-up counts under memory: the policy's K_i, D and M, never increasing; GPipe needs M.

        D comes from the replica with most rows. Without saved bytes memory is unchecked. With
        `layout.shard` and `layout.recompute`, stages whose warm-up memory would cut short share
        out their optimizer's state, and recompute: whichever of these first suffices, or helps most.
        State is also shared out where the update is shorter for it.
        """
        stages = self.split_stages(layout)
        total = layout.micro_batches
        whole = self.schedule == "gpipe"
        counts: list[int] = []
        wanted = self.wanted_warmup(layout)
        for number in range(len(stages)):
            want = min(wanted[number], counts[-1] if counts else wanted[0])
            best, allowed = stages[number], -1
            for stage in leaner(stages[number], layout, self._update_seconds):
                stages[number] = stage
                room = self._memory.allowed_in_flight(stages, number, total, want)
                if room > allowed:
                    best, allowed = stage, room
                if allowed >= want:
                    break
            stages[number] = best
            if allowed < (want if whole else 1):
                least = want if whole else 1
                return self._memory.refusal(layout, name, stages, number, least, whole)
            counts.append(min(want, allowed))
            wanted = self._spread(layout, wanted, counts)
        return tuple(
            stage.model_copy(update={"warmup": count})
            for stage, count in zip(stages, counts, strict=True)
        )

    def _update_seconds(self, stage: StagePlan) -> tuple[float, ...]:
        return update_seconds(self.model, stage)

    def split_stages(self, layout: Layout) -> list[StagePlan]:
        """The stages with their rows, without those devices that have none in proportion."""
        splits = self.tables(layout.micro_batches).splits
        found = []
        for stage in layout.stages():
            split = splits.of(stage.devices)
            changes = {"devices": split.devices, "rows": split.shares}
            found.append(stage.model_copy(update=changes) if self.proportional else stage)
        return found

    def wanted_warmup(self, layout: Layout, policy: str | None = None) -> Sequence[int]:
        """The K_i of the layout's policy or another, whatever the memory; GPipe wants M everywhere."""
        policy = self.schedule if self.schedule == "gpipe" else policy or layout.policy
        return _wanted(layout.num_stages, layout.micro_batches, policy)

    def guess_warmup(self, layout: Layout) -> list[int] | None:
        """The counts of `fit`, found faster and not quite exact; None: it does not fit.

        Without recomputation, and with tensors that skip stages counted at every cut.
        """
        total = layout.micro_batches
        wanted = self.wanted_warmup(layout)
        if not self.memory_is_known:
            return list(wanted)
        tables = self.tables(total)
        counts: list[int] = []
        for number, (start, stop) in enumerate(itertools.pairwise(layout.bounds)):
            devices = layout.devices[number]
            factor = self.state_factor(len(devices), layout.shard)
            room = tables.room(devices, start, stop, factor)
            want = min(wanted[number], counts[-1] if counts else total)
            if room < (want if self.schedule == "gpipe" else 1):
                return None
            counts.append(min(want, int(room)))
            wanted = self._spread(layout, wanted, counts)
        return counts

    def _spread(self, layout: Layout, wanted: Sequence[int], counts: list[int]) -> Sequence[int]:
        """What later stages want when the first one has what memory allows it."""
        if layout.policy == WIDE and len(counts) == 1 and counts[0] < wanted[0]:
            falling = falling_counts(counts[0], layout.num_stages)
            return [min(pair) for pair in zip(wanted, falling, strict=True)]
        return wanted

    def most_in_flight(self, stages: Sequence[StagePlan], micro_batches: int) -> list[int]:
        """Per stage the most micro-batches in flight that its memory holds, at most M."""
        return [
            self._memory.allowed_in_flight(stages, number, micro_batches, micro_batches)
            for number in range(len(stages))
        ]

    def too_full(
        self, stages: Sequence[StagePlan], micro_batches: int, schedule: Schedule, room: Room
    ) -> list[int]:
        """The stages whose devices do not hold what any schedule lets them hold."""
        return self._memory.too_full(stages, micro_batches, schedule, room)

    def plan(self, layout: Layout, stages: tuple[StagePlan, ...], planner: str) -> Plan:
        """The plan of a layout whose stages fit; not yet predicted."""
        return Plan(
            model=self.profile.model,
            global_batch_size=self.global_batch_size,
            micro_batch_size=math.ceil(self.global_batch_size / layout.micro_batches),
            num_micro_batches=layout.micro_batches,
            schedule=self.schedule,
            planner=planner,
            network_model="paper" if self.model.network.model == "paper" else "shared",
            optimizer=self.optimizer,
            optimizer_state_factor=self.optimizer_state_factor,
            stages=stages,
            cluster=self.cluster,
            profile_fingerprint=self._profile_fingerprint,
            model_fingerprint=self.profile.model_fingerprint,
        )

    def step_seconds(self, stages: Sequence[StagePlan], micro_batches: int) -> float:
        """The simulated step, seconds. Tuning asks for some a second time."""
        key = tuple(stages), micro_batches
        found = self._step_seconds.get(key)
        if found is None:
            found = self._step_seconds[key] = step_seconds(
                self.model, stages, self.global_batch_size, micro_batches, self.schedule
            )
        return found

    @cached_property
    def _profile_fingerprint(self) -> str:
        return self.profile.fingerprint()


@functools.lru_cache(maxsize=1024)
def _wanted(stages: int, total: int, policy: str) -> tuple[int, ...]:
    """K_i of so many stages and micro-batches under a warm-up policy, or M under "gpipe"."""
    if policy == "gpipe":
        return (total,) * stages
    if policy == WIDE:
        return tuple(min(2 * k - 1, total) for k in warmup_counts(stages, 2 * total, "B"))
    return warmup_counts(stages, total, policy)
