"""Profiles: what each layer of a model costs, measured on this machine."""

from dapple.profiler.local import ProfileRequest, profile, profile_locally
from dapple.profiler.measured import measure_profile

__all__ = ["ProfileRequest", "measure_profile", "profile", "profile_locally"]
