"""`dapple emulate`: run a plan for real, with layers that wait instead of computing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dapple.cli import common, options
from dapple.errors import InputError, PlanError
from dapple.files import check_output

if TYPE_CHECKING:
    from dapple.records import ModelProfile, Plan

MOST_PROCESSES = 64
"""A slip in a plan must not start thousands of processes."""


def emulate(
    plan: options.PlanFile,
    profile: options.ProfileOfPlan,
    steps: Annotated[int, typer.Option(help="Steps to measure, after two to warm up.")] = 5,
    time_scale: Annotated[float, typer.Option(help="Factor for all seconds.")] = 1.0,
    byte_scale: Annotated[float, typer.Option(help="Factor for all bytes.")] = 1.0,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/emulation"),
    profile_batch_size: options.ProfileBatchSize = None,
) -> None:
    """Run a plan's schedule, messages and memory in as many processes, without its devices.

    Layers wait for their profiled time and make tensors of their profiled size; messages go over
    this machine's own links.

    Example: dapple emulate plan.json --profile profile.json --byte-scale 0.01
    """
    common.require_torch("emulate")
    from dapple.emulator.scaling import emulated_profile
    from dapple.records import ModelProfile, Plan, load_record
    from dapple.runtime.launch import launch, under_torchrun

    found = load_record(Plan, plan)
    if under_torchrun():
        from dapple.emulator.worker import run_emulation

        costs = load_record(ModelProfile, profile)
        with common.step_progress(steps, "emulating") as report:
            run_emulation(costs, found, output, steps, report)
        return
    costs = common.read_profile(profile, profile_batch_size)
    _check(found, costs, steps)
    # Before anything starts: the plan is one that a simulation accepts.
    from dapple.simulator import simulate

    simulate(found, costs, spans=False)
    emulated = emulated_profile(costs, time_scale=time_scale, byte_scale=byte_scale)
    local = _on_ranks(found)
    for name in ("plan.json", "profile.json", "cluster.toml", "timeline.json", "trace.json"):
        check_output(output / name)
    emulated.save(output / "profile.json")
    local.save(output / "plan.json")
    (output / "timeline.json").unlink(missing_ok=True)
    arguments = ["emulate", str(output / "plan.json"), "--profile", str(output / "profile.json")]
    launch(local.num_devices, "dapple", [*arguments, f"--steps={steps}", f"--output={output}"])
    _report(local, emulated, output)


def _check(plan: Plan, profile: ModelProfile, steps: int) -> None:
    if steps < 1:
        raise InputError(f"--steps is {steps}; measure at least 1 step")
    if plan.num_devices > MOST_PROCESSES:
        raise PlanError(
            f"the plan uses {plan.num_devices} devices; at most {MOST_PROCESSES} processes are "
            "started here, emulate a smaller plan"
        )
    if plan.num_layers != profile.num_layers:
        raise PlanError(
            f"the plan covers {plan.num_layers} layers but the profile has {profile.num_layers}; "
            "use the profile that the plan was made for"
        )


def _on_ranks(plan: Plan) -> Plan:
    """The plan with ranks for devices, on one machine, for any model of its shape."""
    from dapple.cluster import Cluster, DeviceKind, Link, Machines

    kinds, rank_of = plan.cluster.kind_of_device(), plan.rank_of_device()
    memory = max(kinds[device].memory for device in rank_of)
    machine = Machines(
        devices=plan.num_devices,
        kind=DeviceKind(name="process", memory=memory),
        inside=Link(bandwidth=1e9),
    )
    stages = [
        stage.model_copy(update={"devices": tuple(rank_of[d] for d in stage.devices)})
        for stage in plan.stages
    ]
    changes = {
        "stages": tuple(stages),
        "cluster": Cluster(name="this machine", machines=(machine,)),
        "network_model": "shared",
        "model_fingerprint": None,
        "profile_fingerprint": None,
        "predicted": None,
    }
    return plan.model_copy(update=changes)


def _report(plan: Plan, profile: ModelProfile, folder: Path) -> None:
    from dapple.cluster import load_cluster
    from dapple.records import Timeline, load_record
    from dapple.reporting import (
        chrome_trace,
        pipeline_drawing,
        predicted_against_measured,
        waiting_table,
    )
    from dapple.simulator import predict, simulate

    measured = load_record(Timeline, folder / "timeline.json")
    cluster = load_cluster(str(folder / "cluster.toml")) if plan.num_devices > 1 else plan.cluster
    predicted = predict(plan, profile, cluster=cluster)
    common.write_json(folder / "trace.json", chrome_trace(measured))
    console = common.console()
    console.print(pipeline_drawing(measured, width=console.width))
    console.print(predicted_against_measured(plan, measured, predicted))
    console.print(waiting_table(simulate(plan, profile, cluster=cluster), measured))
    console.print(f"timeline.json, trace.json and cluster.toml (the links here) are in {folder}")
