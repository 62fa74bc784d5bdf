"""Profiling on this machine with as many busy processes as will train."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import queue
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dapple.cluster import Cluster, DeviceKind, Link, Machines, load_cluster
from dapple.errors import DappleError, InputError, RunError
from dapple.graph import CaptureWarning, capture, is_warning
from dapple.graph.precision import PrecisionName
from dapple.profiler.links import measure_link
from dapple.profiler.measured import DEFAULT_BATCH_SIZES, DEFAULT_ROUNDS, Report, measure_profile
from dapple.records import ModelProfile, load_record
from dapple.workload import Workload

Factory = Callable[[], Workload]
_PACKAGE = os.path.dirname(__file__)
_PROCESSES_PER_CORE = 16
_SINGLE = Link(bandwidth=10e9)


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure.

    Attributes:
        factory: makes the workload; has to be picklable, such as a module's function or a
            `functools.partial` of one.
        devices: processes that are busy at the same time.
        batch_sizes: rows to measure.
        rounds: passes per batch size.
        seed: of the model's weights.
        finer: layers are leaf modules.
        threads: threads of each process.
        precision: "float32", or autocast in "bf16" or "fp16".
    """

    factory: Factory
    devices: int = 1
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES
    rounds: int = DEFAULT_ROUNDS
    seed: int = 0
    finer: bool = False
    threads: int = 1
    precision: PrecisionName = "float32"


def profile(
    factory: Factory,
    *,
    devices: int = 1,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    rounds: int = DEFAULT_ROUNDS,
    finer: bool = False,
    precision: PrecisionName = "float32",
    report: Report | None = None,
) -> tuple[ModelProfile, Cluster]:
    """Profile a model on this machine while `devices` processes are busy.

    The processes are spawned, so a script has to call this under `if __name__ == "__main__":`.

    Args:
        factory: makes the workload; a module's function, or a `functools.partial` of one.
        devices: processes that measure at the same time: as many as will train here.
        batch_sizes: rows to measure, ascending.
        rounds: passes per batch size; the median counts.
        finer: layers are leaf modules rather than blocks.
        precision: "float32", or autocast in "bf16" or "fp16", as the trainer will compute.
        report: told (what, fraction done) from time to time.

    Returns:
        The profile, and this machine as a cluster of `devices` devices.

    Warns:
        CaptureWarning: of what `capture` warns of. All that it notes is in the profile's `notes`.

    Raises:
        InputError: a bad argument, or the model can't be made or captured.
        RunError: a measuring process died.
    """
    request = ProfileRequest(
        factory, devices, batch_sizes, rounds, finer=finer, precision=precision
    )
    found, cluster = profile_locally(request, report)
    for note in found.notes:
        if is_warning(note):
            warnings.warn(f"{found.model}: {note}", CaptureWarning, stacklevel=2)
    return found, cluster


def profile_locally(
    request: ProfileRequest, report: Report | None = None
) -> tuple[ModelProfile, Cluster]:
    """Profile a model on this machine and measure the links between its processes.

    Args:
        request: what to measure.
        report: told (what, fraction done) from time to time.

    Returns:
        The profile, and this machine as a cluster of `devices` devices.

    Raises:
        InputError: a bad request, or the model can't be made or captured.
        RunError: a measuring process died.
    """
    _check(request)
    with tempfile.TemporaryDirectory(prefix="dapple-profile-") as folder:
        context = multiprocessing.get_context("spawn")
        messages: Any = context.Queue()
        running = multiprocessing.spawn(
            _measure, (request, folder, messages), nprocs=request.devices, join=False
        )
        assert running is not None
        try:
            while not running.join(timeout=0.2):
                _pass_on(messages, report)
            _pass_on(messages, report)
        except (
            multiprocessing.ProcessRaisedException,
            multiprocessing.ProcessExitedException,
        ) as error:
            raise _failure(folder, error) from error
        profile = load_record(ModelProfile, Path(folder) / "profile.json")
        return profile, load_cluster(str(Path(folder) / "cluster.toml"))


def _check(request: ProfileRequest) -> None:
    most = _PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if not 1 <= request.devices <= most:
        raise InputError(
            f"devices is {request.devices}; measure with 1 to {most} processes on this machine"
        )
    if request.rounds < 1:
        raise InputError(f"rounds is {request.rounds}; measure at least 1 pass")


def _pass_on(messages: Any, report: Report | None) -> None:
    while True:
        try:
            what, fraction = messages.get_nowait()
        except queue.Empty:
            return
        if report is not None:
            report(what, fraction)


def _failure(folder: str, error: Exception) -> DappleError:
    note = Path(folder) / "input-error"
    if note.exists():
        return InputError(note.read_text(encoding="utf-8"))
    lines = str(error).strip().splitlines() or [repr(error)]
    return RunError(
        f"a measuring process failed: {lines[-1]}{_where(lines)}; profile fewer devices or smaller "
        "batch sizes if memory ran out"
    )


def _where(traceback: Sequence[str]) -> str:
    """The last line of the user's own code in a traceback, in words."""
    frames = [line.strip() for line in traceback if line.startswith('  File "')]
    libraries = tuple(os.path.dirname(f) for f in (torch.__file__, os.__file__, _PACKAGE))
    own = [f for f in frames if not f.removeprefix('File "').startswith(libraries)]
    return f" ({own[-1]})" if own else ""


def _measure(rank: int, request: ProfileRequest, folder: str, messages: Any) -> None:
    # Export logs its failures at length; they are raised as well.
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    # Not once per process: what capture warns of is in the profile.
    warnings.simplefilter("ignore", CaptureWarning)
    torch.set_num_threads(request.threads)
    store = dist.FileStore(str(Path(folder) / "store"), request.devices)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=request.devices)
    report = (lambda what, fraction: messages.put((what, fraction))) if rank == 0 else None
    try:
        torch.manual_seed(request.seed)
        workload = request.factory()
        graph = capture(
            workload.model,
            workload.inputs(4),
            loss=workload.loss,
            name=workload.name,
            finer=request.finer,
            evaluation=False,
            lengths=workload.lengths,
        )
        profile = measure_profile(
            graph,
            workload,
            batch_sizes=request.batch_sizes,
            rounds=request.rounds,
            precision=request.precision,
            report=report,
        )
    except InputError as error:
        (Path(folder) / "input-error").write_text(str(error), encoding="utf-8")
        raise
    link = measure_link() if request.devices > 1 else _SINGLE
    if rank == 0:
        profile.save(Path(folder) / "profile.json")
        cluster = local_cluster(request.devices, link)
        (Path(folder) / "cluster.toml").write_text(cluster.to_toml(), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def local_cluster(devices: int, link: Link) -> Cluster:
    """This machine as a cluster: its memory divided by its devices."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind = DeviceKind(name="cpu", memory=total // devices)
    group = Machines(devices=devices, kind=kind, inside=link)
    return Cluster(name="local", machines=(group,), source="measured on this machine")


def measure_local_cluster(devices: int) -> Cluster:
    """This machine as a cluster of `devices` devices, its links measured now."""
    from dapple.zoo import make_workload

    factory = functools.partial(make_workload, "mlp")
    request = ProfileRequest(factory, devices=devices, batch_sizes=(1,), rounds=1)
    return profile_locally(request)[1]


def load_factory(model: str, arguments: dict[str, Any]) -> Factory:
    """What makes the workload that MODEL stands for: a zoo name or "module:function".

    Raises:
        InputError: no such model, module or function, or arguments that it does not take.
    """
    if ":" not in model:
        from dapple.zoo import make_workload

        with torch.device("meta"):
            # Cheap, and says at once what is wrong.
            make_workload(model, **arguments)
        return functools.partial(make_workload, model, **arguments)
    function = load_function(model)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise InputError(f'"{model}" can not be called with {arguments}: {error}') from error
    except ValueError:
        pass  # a function without a signature
    return functools.partial(_from_module, model, arguments)


def _from_module(model: str, arguments: dict[str, Any]) -> Workload:
    workload = load_function(model)(**arguments)
    if not isinstance(workload, Workload):
        raise InputError(
            f'"{model}" returned {type(workload).__name__}; it must return a dapple.Workload'
        )
    return workload


def load_function(path: str) -> Callable[..., Any]:
    """The function at "module:function".

    Raises:
        InputError: no such module or function.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise InputError(f'"{path}" names no function; write it like "my_module:function"')
    if os.getcwd() not in sys.path:
        # The installed command does not look for modules where it runs, `python -m` does.
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(
            f'module "{module_name}" of "{path}" can not be imported: {error}; check the name, or '
            "run from the folder that holds it"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f'module "{module_name}" has no function "{name}"')
    return function  # type: ignore[no-any-return]
