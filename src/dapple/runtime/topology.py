"""Who is who in a run: ranks, stages and replicas of a plan, as a value that is passed around."""

from __future__ import annotations

from dataclasses import dataclass

from dapple.costs import recomputed_ranges, split_rows
from dapple.errors import PlanError
from dapple.records import Plan, StagePlan


@dataclass(frozen=True)
class Topology:
    """The place of one rank in a plan.

    Ranks are the plan's devices in ascending order; replica r of a stage is its r-th device.

    Attributes:
        plan: the plan.
        rank: this rank.
        position: its place in the pipeline, see `Plan.positions`.
        stage: the stage it runs; of several virtual ones the first.
        replica: which replica of the stage it is.
        ranks: per stage the ranks of its replicas, in order.
    """

    plan: Plan
    rank: int
    position: int
    stage: int
    replica: int
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, plan: Plan, rank: int, world_size: int) -> Topology:
        """The place of `rank` in the plan.

        Raises:
            PlanError: the world size is not the plan's number of devices, or the plan holds
                something that the runtime can't execute.
        """
        if world_size != plan.num_devices:
            raise PlanError(
                f"the plan uses {plan.num_devices} devices but the run has {world_size} "
                f"processes; start torchrun with {plan.num_devices} processes in all, or make a "
                f"plan for {world_size} devices"
            )
        _check_executable(plan)
        rank_of = plan.rank_of_device()
        ranks = tuple(tuple(rank_of[d] for d in stage.devices) for stage in plan.stages)
        position, stage = next(
            (p, own[0]) for p, own in enumerate(plan.positions) if rank in ranks[own[0]]
        )
        return cls(plan, rank, position, stage, ranks[stage].index(rank), ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def is_last(self) -> bool:
        """This rank runs the last stage, which computes the loss."""
        return self.num_stages - 1 in self.stages

    @property
    def stages(self) -> tuple[int, ...]:
        """All stages that this rank runs, ascending."""
        return self.plan.positions[self.position]

    @property
    def stage_plan(self) -> StagePlan:
        """The plan of this rank's stage."""
        return self.plan.stages[self.stage]

    def stage_of_layer(self, layer: int) -> int:
        """The stage that runs a layer."""
        return next(i for i, s in enumerate(self.plan.stages) if s.start <= layer < s.stop)

    def holders(self, layers: list[int]) -> tuple[int, ...]:
        """The ranks of all stages that run any of these layers, ascending."""
        stages = {self.stage_of_layer(layer) for layer in layers}
        return tuple(sorted({rank for stage in stages for rank in self.ranks[stage]}))


def _check_executable(plan: Plan) -> None:
    for stage in plan.stages:
        # Each says what is wrong with it.
        recomputed_ranges(stage, plan.num_layers)
        split_rows(1, stage.replicas, stage.rows)
    blocked = list(plan.simulate_only)
    if plan.virtual != 1 and any(stage.shard != "none" for stage in plan.stages):
        blocked.append("a sharded optimizer with virtual stages")
    if blocked:
        raise PlanError(
            f"the runtime can't execute {', '.join(dict.fromkeys(blocked))} yet, the plan is for "
            "simulation only; make a plan without it"
        )
