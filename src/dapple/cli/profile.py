"""`dapple profile`: what each layer of a model costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dapple.cli import common
from dapple.errors import InputError


def profile(
    model: Annotated[str, typer.Argument(help='A zoo name, or "module:function".')],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the profile goes.")],
    args: Annotated[
        str, typer.Option("--args", help="Arguments of the model's factory, as JSON.")
    ] = "{}",
    device: Annotated[str, typer.Option(help="What to measure on.")] = "cpu",
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Rows to measure, ascending.")
    ] = "1,2,4,8",
    devices: Annotated[
        int, typer.Option(help="Processes that are busy at the same time, as in training.")
    ] = 1,
    rounds: Annotated[int, typer.Option(help="Passes per batch size.")] = 7,
    finer: Annotated[bool, typer.Option(help="Layers are leaf modules, not blocks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure what each layer of a model costs on this machine.

    Example: dapple profile gpt --args '{"layers": 4}' --devices 2 -o profile.json
    """
    common.require_torch("profile")
    if device != "cpu":
        raise InputError(
            f'device "{device}" can not be profiled yet; only "cpu", this machine, is measured'
        )
    from dapple.profiler.local import ProfileRequest, load_factory, profile_locally

    common.check_output(output)
    request = ProfileRequest(
        factory=load_factory(model, common.parse_arguments(args)),
        devices=devices,
        batch_sizes=common.parse_batch_sizes(batch_sizes, "--batch-sizes"),
        rounds=rounds,
        finer=finer,
    )
    with common.progress("profiling") as report:
        found, cluster = profile_locally(request, report)
    found.save(output)
    common.save_cluster(cluster, common.local_cluster_path(devices))
    if as_json:
        common.print_json(found.model_dump(mode="json", exclude_none=True))
        return
    from dapple.reporting import profile_table

    common.console().print(profile_table(found))
    common.console().print(f"profile written to {output}")
