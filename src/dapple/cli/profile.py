"""`dapple profile`: what each layer of a model costs, here or on a device that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from dapple.cli import common, options
from dapple.cli.analytic import make_profile
from dapple.errors import InputError
from dapple.files import check_output

if TYPE_CHECKING:
    from dapple.records import ModelProfile


def profile(
    model: Annotated[str, typer.Argument(help='A zoo name, or "module:function".')],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the profile goes.")],
    args: options.FactoryArguments = "{}",
    device: Annotated[
        str,
        typer.Option(help="cpu is measured; others, such as v100-16gb, are computed from shapes."),
    ] = "cpu",
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Rows, ascending; 1,2,4,8 to measure, up to 128 to compute."),
    ] = None,
    devices: Annotated[
        int, typer.Option(help="Processes that are busy at the same time, as in training.")
    ] = 1,
    rounds: Annotated[int, typer.Option(help="Passes per batch size.")] = 7,
    dtype: Annotated[
        str | None, typer.Option(help="Type to compute for; the device's usual by default.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="Measured in: float32 (the model's types), or autocast: bf16, fp16.")
    ] = "float32",
    finer: Annotated[bool, typer.Option(help="Layers are leaf modules, not blocks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure what each layer of a model costs on this machine, or compute it for another device.

    Example: dapple profile gpt --args '{"layers": 4}' --devices 2 -o profile.json
    Without the device: dapple profile bert-48 --device v100-16gb -o bert-48.json
    """
    common.require_torch("profile")
    sizes = (
        common.parse_batch_sizes(batch_sizes, "--batch-sizes") if batch_sizes is not None else None
    )
    check_output(output)
    arguments = common.parse_arguments(args)
    if device == "cpu":
        if dtype is not None:
            raise InputError("--dtype goes with another --device than cpu, which is measured")
        found = _measured(model, arguments, devices, sizes, rounds, finer, precision)
    else:
        if precision != "float32":
            raise InputError(
                "--precision goes with --device cpu; another device is computed for the type in --dtype"
            )
        found = make_profile(model, arguments, device, sizes, dtype, finer)
    found.save(output)
    if as_json:
        common.print_json(found.model_dump(mode="json", exclude_none=True))
        return
    from dapple.reporting import profile_table

    common.console().print(profile_table(found))
    common.print_notes(found)
    common.console().print(f"profile written to {output}")


def _measured(
    model: str,
    arguments: dict[str, Any],
    devices: int,
    sizes: tuple[int, ...] | None,
    rounds: int,
    finer: bool,
    precision: str,
) -> ModelProfile:
    from dapple.graph.precision import PrecisionName
    from dapple.profiler.local import ProfileRequest, load_factory, profile_locally
    from dapple.profiler.measured import DEFAULT_BATCH_SIZES

    if precision not in get_args(PrecisionName):
        raise InputError(f'--precision "{precision}" is unknown; known: float32, bf16, fp16')
    request = ProfileRequest(
        factory=load_factory(model, arguments),
        devices=devices,
        batch_sizes=sizes or DEFAULT_BATCH_SIZES,
        rounds=rounds,
        finer=finer,
        precision=cast(PrecisionName, precision),
    )
    with common.progress("profiling") as report:
        found, cluster = profile_locally(request, report)
    common.save_cluster(cluster, common.local_cluster_path(devices))
    return found
