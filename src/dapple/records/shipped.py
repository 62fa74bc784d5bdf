"""Profiles that come with dapple: the paper's models on the paper's device, from their shapes.

Written by `dapple profile NAME --device v100-16gb`, most with fewer `--batch-sizes` than the usual
ones; a test holds them against a new one.
"""

from __future__ import annotations

import json
from importlib.resources import files

from dapple.records.base import validate_record
from dapple.records.profile import ModelProfile


def shipped_profile(model: str, device: str) -> ModelProfile | None:
    """The profile of a model of the zoo on a device; None if none comes with dapple."""
    place = files("dapple") / "profiles" / f"{model}.{device}.json"
    if not place.is_file():
        return None
    return validate_record(ModelProfile, json.loads(place.read_text(encoding="utf-8")), str(place))


def shipped_models(device: str) -> tuple[str, ...]:
    """The models with a profile for a device, by name."""
    folder = files("dapple") / "profiles"
    ending = f".{device}.json"
    names = [place.name for place in folder.iterdir()] if folder.is_dir() else []
    return tuple(sorted(n.removesuffix(ending) for n in names if n.endswith(ending)))
