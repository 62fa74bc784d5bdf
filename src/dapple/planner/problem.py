"""What is to be planned, and the two judges of a layout: memory and the simulator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dapple.cluster import Cluster
from dapple.costs import CostModel, StageMemory, split_rows, stage_memory
from dapple.errors import InputError
from dapple.planner.bank import Bank
from dapple.planner.refusal import Refusal
from dapple.planner.symmetry import Symmetry
from dapple.planner.tables import CostTables
from dapple.planner.warmup import falling_counts
from dapple.records import MOST_MICRO_BATCHES, ModelProfile, Plan, StagePlan
from dapple.schedule import SCHEDULES, warmup_counts
from dapple.simulator import step_seconds

OPTIMIZER_STATE = {
    "adamw": 2.0,
    "adam": 2.0,
    "sgd": 0.0,
    "momentum": 1.0,
    "adadelta": 2.0,
    "adafactor": 0.0,
    "adagrad": 1.0,
    "adamax": 2.0,
    "asgd": 1.0,
    "muon": 1.0,
    "nadam": 2.0,
    "radam": 2.0,
    "rmsprop": 1.0,
    "rprop": 2.0,
}
"""Bytes of optimizer state per byte of parameters, by the class in torch.optim with its default
arguments; "momentum" is SGD with momentum. Adafactor's rows and columns count as nothing.
"""
WIDE = "wide"
"""Warm-up counts of up to twice policy B's, for `tune_warmup` to lower in the end.

Where memory holds fewer, they fall evenly: stages of equal counts would take turns.
"""
_ROUNDING = 8
"""Bytes that the rounding of a stage's parts can amount to."""


@dataclass(frozen=True, order=True)
class Layout:
    """A plan before memory caps its warm-up: cuts, devices, M and the warm-up policy.

    Attributes:
        bounds: S + 1 layer numbers from 0 to N; stage s holds layers bounds[s]..bounds[s + 1].
        devices: per stage its devices.
        micro_batches: M.
        policy: warm-up policy "A" or "B" (DAPPLE, section 3), or `WIDE`.
        recompute: stages whose activations do not fit run their forwards again.
        shard: stages that do not fit share out their optimizer's state among their replicas.
    """

    bounds: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    micro_batches: int
    policy: str = "A"
    recompute: bool = False
    shard: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.devices)

    def stages(self, warmup: Sequence[int] | None = None) -> tuple[StagePlan, ...]:
        """The stages, with warm-up counts if given."""
        counts = warmup or [1] * self.num_stages
        return tuple(
            StagePlan(start=a, stop=b, devices=devices, warmup=k)
            for (a, b), devices, k in zip(
                itertools.pairwise(self.bounds), self.devices, counts, strict=True
            )
        )


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
        shard: replicas may share out their optimizer's state where memory is short.
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
            _check_known("warm-up policy", warmup, ("A", "B", "tuned"))
        _check_batch(global_batch_size, micro_batch_size)
        _check_known("optimizer", optimizer, OPTIMIZER_STATE)
        _check_known("schedule", schedule, SCHEDULES[:2])
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
        self._kinds = cluster.kind_of_device()
        self.symmetry = Symmetry(cluster, self.model.network)
        self._tables: dict[int, CostTables] = {}
        self._banks: dict[int, Bank] = {}

    @property
    def speeds_differ(self) -> bool:
        """Whether the cluster has devices of different speed."""
        return len({kind.speed for kind in self._kinds}) > 1

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
        counts = _geometric_counts(self.global_batch_size)
        return tuple(count for count in counts if count <= MOST_MICRO_BATCHES)

    @cached_property
    def memory_is_known(self) -> bool:
        """Whether the profile says what every layer keeps for its backward."""
        return all(layer.saved_bytes is not None for layer in self.profile.layers)

    def variants(self, layout: Layout) -> list[Layout]:
        """The layout with every warm-up policy, recomputation and shards where allowed."""
        known, replicated = self.memory_is_known, any(len(d) > 1 for d in layout.devices)
        again = [False, True] if self.recompute and known else [False]
        shared = [False, True] if self.shard and known and replicated else [False]
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

    def tables(self, micro_batches: int) -> CostTables:
        """Stage and transfer times for M micro-batches."""
        found = self._tables.get(micro_batches)
        if found is None:
            found = CostTables(
                self.profile,
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
        """
        stages = self.split_stages(layout)
        total = layout.micro_batches
        whole = self.schedule == "gpipe"
        counts: list[int] = []
        wanted = self.wanted_warmup(layout)
        for number in range(len(stages)):
            want = min(wanted[number], counts[-1] if counts else wanted[0])
            best, allowed = stages[number], -1
            for stage in _leaner(stages[number], layout):
                stages[number] = stage
                room = self._allowed_in_flight(stages, number, total, want)
                if room > allowed:
                    best, allowed = stage, room
                if allowed >= want:
                    break
            stages[number] = best
            if allowed < (want if whole else 1):
                return self._refusal(layout, name, stages, number, want)
            counts.append(min(want, allowed))
            wanted = self._spread(layout, wanted, counts)
        return tuple(
            stage.model_copy(update={"warmup": count})
            for stage, count in zip(stages, counts, strict=True)
        )

    def split_stages(self, layout: Layout) -> list[StagePlan]:
        """The stages with their rows, without those devices that have none in proportion."""
        splits = self.tables(layout.micro_batches).splits
        found = []
        for stage in layout.stages():
            split = splits.of(stage.devices)
            changes = {"devices": split.devices, "rows": split.shares}
            found.append(stage.model_copy(update=changes) if self.proportional else stage)
        return found

    def wanted_warmup(self, layout: Layout) -> Sequence[int]:
        """The policy's K_i, whatever the memory; GPipe wants M everywhere."""
        if self.schedule == "gpipe":
            return [layout.micro_batches] * layout.num_stages
        stages, total = layout.num_stages, layout.micro_batches
        if layout.policy == WIDE:
            return [min(2 * k - 1, total) for k in warmup_counts(stages, 2 * total, "B")]
        return warmup_counts(stages, total, layout.policy)

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
            room = math.inf
            for rows, memory in tables.splits.loads(devices):
                fixed, each = tables.stage_bytes(start, stop, rows, factor)
                room = min(room, (memory - float(fixed)) / max(float(each), 1.0))
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
            self._allowed_in_flight(stages, number, micro_batches, micro_batches)
            for number in range(len(stages))
        ]

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
        """The simulated step, seconds."""
        return step_seconds(
            self.model, stages, self.global_batch_size, micro_batches, self.schedule
        )

    @cached_property
    def _profile_fingerprint(self) -> str:
        return self.profile.fingerprint()

    def _rows(self, micro_batches: int) -> int:
        return math.ceil(self.global_batch_size / micro_batches)

    def _memory(
        self,
        stages: Sequence[StagePlan],
        number: int,
        rows: int,
        in_flight: int,
        replica: int | None,
    ) -> StageMemory | None:
        return stage_memory(
            self.model,
            stages,
            number,
            rows,
            in_flight,
            optimizer_state_factor=self.optimizer_state_factor,
            replica=replica,
        )

    def _tightest(self, stage: StagePlan, rows: int) -> list[tuple[int, int | None]]:
        """Per memory size in the stage: (bytes available, the replica with most rows there).

        Parameters stay whole when state is shared out. Where rows and state are uneven, the device
        with the least memory must hold the most of both: no replica in particular, so None.
        """
        if stage.shard != "none":
            return [(self.symmetry.least_memory(stage.devices), None)]
        split = split_rows(rows, stage.replicas, stage.rows)
        best: dict[int, int] = {}
        for replica, device in enumerate(stage.devices):
            memory = self._kinds[device].memory
            if memory not in best or split[replica] > split[best[memory]]:
                best[memory] = replica
        return [(available, best[available]) for available in sorted(best)]

    def _allowed_in_flight(
        self, stages: Sequence[StagePlan], number: int, micro_batches: int, want: int
    ) -> int:
        rows = self._rows(micro_batches)
        allowed = want
        for available, replica in self._tightest(stages[number], rows):
            one = self._memory(stages, number, rows, 1, replica)
            two = self._memory(stages, number, rows, 2, replica)
            if one is None or two is None:
                return want
            if one.total > available:
                return 0
            # Memory is linear in K_i, up to the rounding of each part.
            step = max(two.total - one.total, 1)
            allowed = min(allowed, 1 + (available - one.total) // step)
            if allowed > 1 and available - one.total - (allowed - 1) * step < _ROUNDING:
                here = self._memory(stages, number, rows, allowed, replica)
                allowed -= here is not None and here.total > available
        return allowed

    def _refusal(
        self,
        layout: Layout,
        name: str,
        stages: Sequence[StagePlan],
        number: int,
        in_flight: int,
    ) -> Refusal:
        rows = self._rows(layout.micro_batches)
        least = in_flight if self.schedule == "gpipe" else 1
        worst: tuple[int, StageMemory, int] | None = None
        for available, replica in self._tightest(stages[number], rows):
            memory = self._memory(stages, number, rows, least, replica)
            if memory is not None and (worst is None or memory.total - available > worst[0]):
                worst = memory.total - available, memory, available
        assert worst is not None, "only a stage whose memory is known is refused"
        return Refusal(
            name=name,
            stage=number,
            num_stages=len(stages),
            layers=(stages[number].start, stages[number].stop),
            devices=stages[number].devices,
            device_kind=self._kinds[stages[number].devices[0]].name,
            micro_batch_rows=rows,
            in_flight=least,
            needed=worst[1],
            available=worst[2],
            optimizer=self.optimizer,
        )


def _leaner(stage: StagePlan, layout: Layout) -> Iterator[StagePlan]:
    """The stage, and then with what its layout allows it to save memory with."""
    shards = ["none", "optimizer"] if layout.shard and stage.replicas > 1 else ["none"]
    for again, shard in itertools.product([False, True] if layout.recompute else [False], shards):
        yield stage.model_copy(update={"recompute": again, "shard": shard})


def _geometric_counts(batch: int) -> tuple[int, ...]:
    """M = 1, 2, 3, 4, 6, 8, 12, ... and the batch itself: no two neighbours 2 or more apart."""
    doubles = [2**k for k in range(batch.bit_length())]
    counts = {m for power in doubles for m in (power, 3 * power // 2)}
    return tuple(sorted({m for m in counts if m <= batch} | {batch}))


def _check_batch(global_batch_size: int, micro_batch_size: int | None) -> None:
    if global_batch_size < 1:
        raise InputError(f"global batch size {global_batch_size} must be at least 1 row")
    if micro_batch_size is not None and not 1 <= micro_batch_size <= global_batch_size:
        raise InputError(
            f"micro-batch size {micro_batch_size} must lie between 1 and the global batch size "
            f"{global_batch_size}"
        )
    count = math.ceil(global_batch_size / (micro_batch_size or global_batch_size))
    if count > MOST_MICRO_BATCHES:
        raise InputError(
            f"micro-batches of {micro_batch_size} cut {global_batch_size} rows into {count}, more "
            f"than {MOST_MICRO_BATCHES}; pass a larger micro-batch size"
        )


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise InputError(f'{what} "{name}" is unknown; known: {", ".join(known)}')
