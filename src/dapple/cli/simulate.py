"""`dapple simulate`: what a plan's step will look like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dapple.cli import common, options
from dapple.files import check_output


def simulate(
    plan: options.PlanFile,
    profile: options.ProfileOfPlan,
    cluster: Annotated[
        str | None, typer.Option(help="Another cluster than the plan's own.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Another schedule than the plan's: early-backward, gpipe, interleaved, "
            "zero-bubble, or a CSV file of your own."
        ),
    ] = None,
    export_schedule: Annotated[
        Path | None, typer.Option(help="Write the schedule as PyTorch's CSV.")
    ] = None,
    network_model: Annotated[str | None, typer.Option(help="shared or paper.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace that opens in Perfetto.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the step: .svg, .png or .pdf (needs matplotlib).")
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(help="A run's timeline.json, to lay beside the simulated step."),
    ] = None,
    profile_batch_size: options.ProfileBatchSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the timeline as JSON.")] = False,
) -> None:
    """Simulate one step of a plan: times, bubbles, memory.

    Example: dapple simulate plan.json --profile profile.json --schedule gpipe --picture step.svg
    """
    from dapple.planner.reschedule import rescheduled
    from dapple.records import Plan, Timeline, load_record
    from dapple.reporting import (
        check_picture,
        chrome_trace,
        pipeline_drawing,
        plan_table,
        save_picture,
        waiting_table,
    )
    from dapple.schedule import save_schedule
    from dapple.simulator import predict, schedule_of
    from dapple.simulator import simulate as run

    for path in (trace, export_schedule, picture):
        if path is not None:
            check_output(path)
    if picture is not None:
        check_picture(picture)
    ran = load_record(Timeline, measured) if measured is not None else None
    found = load_record(Plan, plan)
    common.check_rows(found.global_batch_size, f"{plan}: global batch size")
    costs = common.read_profile(profile, profile_batch_size)
    machines = common.find_cluster(cluster) if cluster is not None else None
    if schedule == "interleaved" and found.virtual == 1:
        found = rescheduled(found, costs, schedule, virtual=2)
        if not as_json:
            common.console().print("layers cut anew for 2 virtual stages per device")
    timeline = run(found, costs, schedule=schedule, cluster=machines, network_model=network_model)
    if trace is not None:
        common.write_json(trace, chrome_trace(timeline))
    if picture is not None:
        steps = {f"{found.model}, simulated": timeline}
        if ran is not None:
            steps[f"{found.model}, {ran.source} run"] = ran
        save_picture(picture, steps)
    if export_schedule is not None:
        made = schedule_of(found, costs, schedule=schedule, cluster=machines)
        save_schedule(made, export_schedule)
    if as_json:
        common.print_json(timeline.model_dump(mode="json", exclude_none=True))
        return
    predicted = predict(
        found, costs, schedule=schedule, cluster=machines, network_model=network_model
    )
    console = common.console()
    console.print(plan_table(found.model_copy(update={"predicted": predicted})))
    console.print(pipeline_drawing(timeline, width=console.width))
    if ran is not None:
        console.print(waiting_table(timeline, ran))
    if picture is not None:
        console.print(f"picture written to {picture}")
    if trace is not None:
        console.print(f"trace written to {trace}; open it in Perfetto")
    if export_schedule is not None:
        console.print(f"schedule written to {export_schedule}")
