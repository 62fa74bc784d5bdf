"""`dapple plan`: the best plan for a profile on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dapple.cli import common, options
from dapple.cli.analytic import costs_of
from dapple.files import check_output


def plan(
    cluster: options.ClusterName,
    global_batch_size: options.GlobalBatchSize,
    profile: Annotated[str | None, typer.Option("--profile", help="A profile file.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help='Instead of a profile: a zoo name, or "module:function".'),
    ] = None,
    args: options.FactoryArguments = "{}",
    device: Annotated[
        str | None,
        typer.Option(help="Where the model's times are for, such as v100-16gb; the cluster's."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the plan goes.")
    ] = None,
    micro_batch_size: options.MicroBatchSize = None,
    memory: options.Memory = None,
    planner: Annotated[
        str,
        typer.Option(
            help="dapple, or a baseline: dp, straight, even, gpipe, torchgpipe, pipedream, hpgo, "
            "paper, paper-corrected."
        ),
    ] = "dapple",
    optimizer: options.Optimizer = "adamw",
    schedule: Annotated[
        str,
        typer.Option(
            help="early-backward, gpipe, interleaved, zero-bubble, any of these, or a CSV file."
        ),
    ] = "early-backward",
    virtual: Annotated[
        int | None, typer.Option(help="Stages per device; 2 for interleaved, else 1 by default.")
    ] = None,
    network_model: options.NetworkModel = None,
    warmup: Annotated[
        str | None, typer.Option(help="Warm-up policy A, B or tuned; the best by default.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option(help="Let stages run forwards again where memory is short.")
    ] = False,
    shard: Annotated[
        bool,
        typer.Option("--shard", help="Let replicas share out optimizer state where that helps."),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what binds the plan, and what else there was.")
    ] = False,
    profile_batch_size: options.ProfileBatchSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Find the plan with the shortest step that fits the devices' memory.

    Example: dapple plan --profile profile.json --cluster config-a --global-batch-size 64 -o plan.json
    Without a profile: dapple plan --model bert-48 --device v100-16gb --cluster config-a --global-batch-size 64
    """
    from dapple.planner import search
    from dapple.planner.explain import explain as explain_plan
    from dapple.planner.problem import Problem
    from dapple.reporting import pipeline_drawing, plan_table
    from dapple.simulator import simulate

    common.check_rows(global_batch_size, "global batch size")
    if output is not None:
        check_output(output)
    machines = common.find_cluster(cluster)
    costs = costs_of(profile, profile_batch_size, model, args, device, machines)
    if memory is not None:
        machines = machines.with_memory(memory)
    result = search(
        costs,
        machines,
        global_batch_size,
        micro_batch_size=micro_batch_size,
        planner=planner,
        optimizer=optimizer,
        schedule=schedule,
        network_model=network_model,
        warmup=warmup,
        recompute=recompute,
        shard=shard,
        virtual=virtual,
    )
    found = result.plan
    if explain:
        by_gpipe = found.schedule == "gpipe" and found.virtual == 1
        problem = Problem(
            costs,
            machines,
            global_batch_size,
            micro_batch_size=micro_batch_size,
            optimizer=optimizer,
            schedule="gpipe" if by_gpipe else "early-backward",
            network_model=network_model,
            warmup=warmup,
            recompute=recompute,
            shard=shard,
        )
        reasons = explain_plan(result, costs, problem)
        found = found.model_copy(update={"explanation": reasons})
    if output is not None:
        found.save(output)
    if as_json:
        common.print_json(found.model_dump(mode="json", exclude_none=True))
        return
    console = common.console()
    for refusal in result.refusals:
        console.print(str(refusal))
    console.print(plan_table(found))
    console.print(pipeline_drawing(simulate(found, costs), width=console.width))
    if found.explanation is not None:
        console.print(str(found.explanation))
    if output is not None:
        console.print(f"plan written to {output}")
