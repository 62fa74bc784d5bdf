"""Which part of the model a node belongs to: a transformer block, an embedding, a head.

A unit is a child of a repeated container (`nn.ModuleList`, `nn.Sequential`), found from the top;
modules beside the containers are units of their own. What the model's own forward computes between
them belongs to the unit before it.
"""

from __future__ import annotations

from torch import nn


class Units:
    """Maps module paths to unit paths for one model.

    Args:
        model: the model.
        finer: units are the leaf modules instead of the children of containers.
    """

    def __init__(self, model: nn.Module, finer: bool = False) -> None:
        self._model = model
        self._finer = finer
        self._cache: dict[str, str] = {}

    def of(self, path: str) -> str:
        """The unit that the module at `path` belongs to; "" for code between units."""
        if path not in self._cache:
            self._cache[path] = self._find(path)
        return self._cache[path]

    def has_parameters(self, unit: str) -> bool:
        """The unit has parameters of its own."""
        module = self._model.get_submodule(unit)
        return any(True for _ in module.parameters())

    def _find(self, path: str) -> str:
        module, repeated = self._model, False
        walked: list[str] = []
        for part in path.split(".") if path else []:
            if not self._divides(module, repeated, root=not walked):
                break
            repeated = _is_list(module)
            child = getattr(module, part, None)
            if not isinstance(child, nn.Module):
                break
            module = child
            walked.append(part)
        if self._divides(module, repeated, root=not walked):
            return ""
        return ".".join(walked)

    def _divides(self, module: nn.Module, repeated: bool, root: bool) -> bool:
        """Whether the module's children are units rather than the module itself."""
        children = list(module.children())
        if not children:
            return False
        if root or self._finer or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return True
        if repeated:
            # A block that happens to be a Sequential of plain layers stays whole; a Sequential of
            # blocks (a ResNet's stage) is opened.
            return _is_list(module) and any(list(child.children()) for child in children)
        return any(_is_list(m) and len(list(m.children())) > 1 for m in module.modules())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
