"""Where `--model NAME --device KIND` finds its profile: shipped, kept from before, or made."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapple.cli import common
from dapple.errors import InputError

if TYPE_CHECKING:
    from dapple.cluster import Cluster
    from dapple.records import ModelProfile


def costs_of(
    profile: str | None,
    profile_batch_size: int | None,
    model: str | None,
    arguments: str,
    device: str | None,
    cluster: Cluster,
) -> ModelProfile:
    """The profile that a plan is made from: a file, or a model on a device.

    Raises:
        InputError: neither a file nor a model, or both.
    """
    if (profile is None) == (model is None):
        raise InputError("pass either --profile FILE or --model NAME")
    if profile is not None:
        if device is not None:
            raise InputError("--device goes with --model; a profile says its device itself")
        return common.read_profile(profile, profile_batch_size)
    assert model is not None
    return model_profile(model, common.parse_arguments(arguments), device or only_device(cluster))


def only_device(cluster: Cluster) -> str:
    """The kind of a cluster's devices.

    Raises:
        InputError: there are several.
    """
    names = sorted({machines.kind.name for machines in cluster.machines})
    if len(names) > 1:
        raise InputError(
            f"the cluster has devices of several kinds ({', '.join(names)}); say with --device "
            "which one the profile is for"
        )
    return names[0]


def model_profile(model: str, arguments: dict[str, Any], device: str) -> ModelProfile:
    """A model's analytic profile, without torch where it is shipped or was made before.

    Profiles of the zoo's models are kept; those of your own code are made each time, for the code
    may have changed.

    Raises:
        InputError: no such model or device, or torch is needed and missing.
    """
    from dapple.records import ModelProfile, load_record
    from dapple.records.shipped import shipped_profile

    from_zoo = re.fullmatch(r"[a-z0-9-]+", model) is not None
    if from_zoo and not arguments and (found := shipped_profile(model, device)):
        return found
    path = _kept_at(model, arguments, device)
    if from_zoo and path.exists():
        return load_record(ModelProfile, path)
    made = make_profile(model, arguments, device)
    if from_zoo:
        made.save(path)
    return made


def make_profile(
    model: str,
    arguments: dict[str, Any],
    device: str,
    batch_sizes: tuple[int, ...] | None = None,
    dtype: str | None = None,
    finer: bool = False,
) -> ModelProfile:
    """A model's analytic profile, made now.

    Raises:
        InputError: no such model or device, or torch is missing.
    """
    from dapple.cluster import device_kind

    device_kind(device, dtype)
    common.require_torch("profile")
    from dapple.graph import CaptureWarning
    from dapple.profiler.analytic import DEFAULT_BATCH_SIZES, analytic_profile
    from dapple.profiler.local import load_factory

    with common.progress(f"profiling {model}") as report, warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # it is in the profile's notes
        return analytic_profile(
            load_factory(model, arguments),
            device,
            batch_sizes=batch_sizes or DEFAULT_BATCH_SIZES,
            dtype=dtype,
            finer=finer,
            report=report,
        )


def _kept_at(model: str, arguments: dict[str, Any], device: str) -> Path:
    from dapple import __version__

    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = json.dumps([__version__, arguments], sort_keys=True)
    mark = hashlib.sha256(key.encode()).hexdigest()[:12]
    return Path(base) / "dapple" / "profiles" / f"{model}.{device}.{mark}.json"
