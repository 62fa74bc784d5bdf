"""`dapple compare`: all planners side by side under one referee."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapple.cli import common, options

if TYPE_CHECKING:
    from dapple.planner import Compared


def compare(
    profile: Annotated[str, typer.Option("--profile", help="A profile file.")],
    cluster: options.ClusterName,
    global_batch_size: options.GlobalBatchSize,
    micro_batch_size: options.MicroBatchSize = None,
    memory: options.Memory = None,
    optimizer: options.Optimizer = "adamw",
    network_model: options.NetworkModel = None,
    profile_batch_size: options.ProfileBatchSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare dapple's plan with those of other planners, each simulated in the same way.

    Example: dapple compare --profile profile.json --cluster config-a --global-batch-size 64
    """
    from dapple.planner import compare as run
    from dapple.reporting import comparison_table

    common.check_rows(global_batch_size, "global batch size")
    costs = common.read_profile(profile, profile_batch_size)
    machines = common.find_cluster(cluster)
    if memory is not None:
        machines = machines.with_memory(memory)
    rows = run(
        costs,
        machines,
        global_batch_size,
        micro_batch_size=micro_batch_size,
        optimizer=optimizer,
        network_model=network_model,
    )
    model = network_model or machines.network_model
    if as_json:
        header = {
            "model": costs.model,
            "cluster": machines.name,
            "global_batch_size": global_batch_size,
            "network_model": model,
        }
        common.print_json(header | {"planners": _as_json(rows)})
        return
    title = f"{costs.model}: {global_batch_size} samples on {machines.name}, network {model}"
    common.console().print(comparison_table(rows, title))


def _as_json(rows: tuple[Compared, ...]) -> list[dict[str, Any]]:
    """One object per planner, in the order of the table; a refused one has its reason only."""
    ours = {row.planner: row.step_seconds for row in rows}.get("dapple")
    return [_row(row, ours) for row in rows]


def _row(row: Compared, ours: float | None) -> dict[str, Any]:
    if row.plan is None or row.plan.predicted is None:
        return {"planner": row.planner, "refused": row.refused}
    plan, predicted = row.plan, row.plan.predicted
    return {
        "planner": row.planner,
        "step_seconds": predicted.step_seconds,
        "ratio": predicted.step_seconds / ours if ours else None,
        "samples_per_second": predicted.samples_per_second,
        "bubble_fraction": predicted.bubble_fraction,
        "peak_bytes": row.peak_bytes,
        "exposed_allreduce_seconds": row.exposed_allreduce_seconds,
        "exposed_transfer_seconds": row.exposed_transfer_seconds,
        "schedule": plan.schedule,
        "num_micro_batches": plan.num_micro_batches,
        "micro_batch_size": plan.micro_batch_size,
        "stages": [stage.model_dump(mode="json", exclude_defaults=True) for stage in plan.stages],
        "note": row.note,
    }
