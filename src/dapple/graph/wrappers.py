"""Models that something else has taken over already: refused by name."""

from __future__ import annotations

from torch import nn

from dapple.errors import CaptureError

# By the name of the class, its own or a parent's: importing FSDP costs a second.
_WRAPPERS = {
    "DataParallel": "nn.DataParallel has its own way of sharing rows out",
    "DistributedDataParallel": "DistributedDataParallel would average gradients that dapple sums",
    "FullyShardedDataParallel": "FSDP has taken its parameters apart",
    "FSDPModule": "fully_shard has taken its parameters apart",
    "OptimizedModule": "torch.compile has wrapped it; use the Trainer's `compile`",
}


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse a model of which some part is in such a wrapper.

    Raises:
        CaptureError: names the part and the wrapper.
    """
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            reason = _WRAPPERS.get(kind.__name__)
            if reason is not None and kind.__module__.startswith("torch."):
                where = f'module "{name}"' if name else "the model"
                raise CaptureError(
                    f"{where} is a {kind.__name__}: {reason}; hand over the plain model, the plan "
                    "decides what is shared out"
                )
