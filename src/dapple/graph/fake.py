"""Models without their memory: shapes instead of numbers, to capture what fits no machine here.

with weightless():                      the user's own constructor; its parameters have no data
    workload = make_workload("bert-48")
fakes = Fakes(workload.model)           the same model on fake tensors of the CPU
graph = capture(workload.model, fakes.of(workload.inputs(2)), ...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree


@contextmanager
def weightless() -> Iterator[None]:
    """Within, parameters lose their data as soon as a module registers them.

    Buffers keep theirs: a forward may compute with them. Tied parameters stay one. The peak of
    memory is the largest parameter.
    """
    register = nn.Module.register_parameter

    def without_data(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = without_data  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Fakes:
    """Turns a weightless model's parameters into fake ones of the CPU, ties kept.

    Attributes:
        mode: the mode that all its fake tensors belong to; what computes with them runs within.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    with self.mode:
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
            if isinstance(module, nn.RNNBase):
                # It keeps a list of its parameters beside them.
                module._init_flat_weights()

    def of(self, values: Any) -> Any:
        """Fake tensors of the same fixed shapes in the same structure."""
        return pytree.tree_map_only(
            torch.Tensor, lambda t: self.mode.from_tensor(t, static_shapes=True), values
        )


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without numbers."""
    return isinstance(value, FakeTensor) or (
        isinstance(value, torch.Tensor) and value.device.type == "meta"
    )
