"""The scale of the loss in fp16: one for all stages, lowered on all when one overflows.

`torch.amp.GradScaler` holds the scale and its settings, so its `state_dict` can be saved and read
elsewhere. Its own `step` looks at one optimizer of one process; here every rank's gradients count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

_LARGEST = torch.finfo(torch.float32).max


def overflowed(gradients: Iterable[torch.Tensor]) -> bool:
    """Some number is infinite or NaN."""
    found = list(gradients)
    # The largest absolute value is finite if and only if all are.
    return bool(found) and not math.isfinite(torch.nn.utils.get_total_norm(found, math.inf))


def unscale(scaler: torch.amp.GradScaler, gradients: Iterable[torch.Tensor]) -> None:
    """Take the scale out of gradients, in place."""
    factor = 1.0 / scaler.get_scale()
    for gradient in gradients:
        gradient.mul_(factor)


def adapt(scaler: torch.amp.GradScaler, overflow: bool) -> None:
    """Lower the scale after an overflow, raise it after enough steps without: as torch does."""
    state = scaler.state_dict()
    if not state:  # a scaler that is disabled
        return
    if overflow:
        state["scale"] *= state["backoff_factor"]
        state["_growth_tracker"] = 0
    else:
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            if state["scale"] * state["growth_factor"] <= _LARGEST:
                state["scale"] *= state["growth_factor"]
            state["_growth_tracker"] = 0
    scaler.load_state_dict(state)
