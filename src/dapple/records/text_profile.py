"""Import of the text profiles of PipeDream and of DAPPLE's authors.

A file lists nodes, then edges, each on a line of its own:

    node1 -- Input -- forward_compute_time=3.4, backward_compute_time=0.0, activation_size=19000000.0, parameter_size=0.0
    node2 -- Conv2d(3, 64) -- forward_compute_time=3.4, backward_compute_time=6.8, activation_size=[3.0e8; 8.4e7], parameter_size=6835.0
        node1 -- node2

Times are milliseconds and sizes bytes, both for one batch of the size that the file's name states.
What a file does not say is not invented: one batch size means linear scaling, and the activations
kept for the backward are unknown, so memory stays unchecked.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from dapple.errors import FileError, InputError
from dapple.files import read_text
from dapple.records.profile import LayerProfile, ModelProfile, TensorProfile

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
# Milliseconds and bytes that a profile can hold.
_LARGEST = dict(zip(_FIELDS, (1e12, 1e12, 1e18, 1e18), strict=True))
_SMALLEST = 1e-20
_ASSIGNMENT = re.compile(r"(\w+)\s*=\s*(\[[^\]]*\]|[^,\s\[]+)")
_METADATA = re.compile(r"\s--\s+(?=\w+\s*=)")


@dataclass
class _Node:
    name: str
    line: int
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float
    parameter_bytes: int
    inputs: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)

    @property
    def looks_constant(self) -> bool:
        return self.parameter_bytes == 0 and self.backward_seconds == 0


def load_text_profile(path: str | os.PathLike[str], batch_size: int) -> ModelProfile:
    """Read a text profile.

    Nodes become layers in topological order, ties in the file's order. Every node's output is one
    tensor that carries a gradient back, except the output of a node without parameters and without
    backward time: a mask or a position, which is recomputed where it is used and crosses no cut.
    Such a node still carries the gradient where a trained node would otherwise have no way to get
    one: of the readers of that node, those that the fewest nodes read (a reshape behind an
    embedding, rather than the positions that every block reads).

    Args:
        path: the file.
        batch_size: rows that its times and sizes are for; part of the file's name ("pbs").

    Returns:
        A profile with one batch size and the source "text".

    Raises:
        FileError: the file cannot be read, or a line carries too little; names the line.
        InputError: the batch size is below 1.
    """
    if batch_size < 1:
        raise InputError(
            f"profile batch size {batch_size} must be at least 1; the file's name states it "
            '("pbs-32" means 32)'
        )
    nodes = _read_nodes(read_text(path), str(path))
    order = _topological_order(nodes, str(path))
    return _to_profile(nodes, order, Path(path).stem, batch_size)


def _read_nodes(text: str, path: str) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    edges: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if "=" not in line:
            edges.append((number, line))
            continue
        key, node = _read_node(line, number, path)
        if key in nodes:
            _refuse(path, number, f'"{key}" is defined twice, first in line {nodes[key].line}')
        nodes[key] = node
    if not nodes:
        raise FileError(
            f"{path} holds no layer; a text profile has lines such as "
            '"node1 -- name -- forward_compute_time=1.0, ..."'
        )
    for number, line in edges:
        _read_edge(line, number, path, nodes)
    return nodes


def _read_node(line: str, number: int, path: str) -> tuple[str, _Node]:
    head, *metadata = _METADATA.split(line.strip(), maxsplit=1)
    key, separator, name = head.partition(" -- ")
    if not metadata or not separator or not key.strip():
        _refuse(path, number, f'"{_short(line)}" is not "node -- name -- field=value, ..."')
    found = dict(_ASSIGNMENT.findall(metadata[0]))
    stray = [part for part in re.split(r"[,\s]+", _ASSIGNMENT.sub(",", metadata[0])) if part]
    if any(part[0].isdigit() for part in stray):
        _refuse(path, number, f'"{stray[0]}" belongs to no field; write numbers like 1.5 or 1000')
    missing = [f for f in _FIELDS if f not in found]
    if missing:
        _refuse(path, number, f"{key} has no {', '.join(missing)}")
    values = {f: _read_value(found[f], f, number, path) for f in _FIELDS}
    return key.strip(), _Node(
        name=name.strip() or key.strip(),
        line=number,
        forward_seconds=values["forward_compute_time"] / 1e3,
        backward_seconds=values["backward_compute_time"] / 1e3,
        activation_bytes=values["activation_size"],
        parameter_bytes=round(values["parameter_size"]),
    )


def _read_value(text: str, what: str, number: int, path: str) -> float:
    parts = text.strip("[]").split(";")
    try:
        values = [float(part) for part in parts if part.strip()]
    except ValueError:
        _refuse(path, number, f'{what} "{text}" is no number')
    if any(not 0 <= value < float("inf") for value in values):
        _refuse(path, number, f"{what} {text} must be finite and not negative")
    if sum(values) > _LARGEST[what]:
        _refuse(path, number, f"{what} {text} is too large; at most {_LARGEST[what]:.0e}")
    if any(0 < value < _SMALLEST for value in values):
        _refuse(path, number, f"{what} {text} is too small; write 0, or at least {_SMALLEST:.0e}")
    return sum(values)


def _read_edge(line: str, number: int, path: str, nodes: dict[str, _Node]) -> None:
    ends = [end.strip() for end in line.split("--")]
    if len(ends) != 2 or not all(ends):
        _refuse(path, number, f'"{_short(line)}" is neither a node with its fields nor an edge')
    for end in ends:
        if end not in nodes:
            _refuse(path, number, f'the edge names "{end}", which no line defines')
    source, target = ends
    if target not in nodes[source].readers:
        nodes[source].readers.append(target)
        nodes[target].inputs.append(source)


def _topological_order(nodes: dict[str, _Node], path: str) -> list[str]:
    missing = {key: len(node.inputs) for key, node in nodes.items()}
    position = {key: number for number, key in enumerate(nodes)}
    keys = list(nodes)
    ready = [position[key] for key, count in missing.items() if count == 0]
    order: list[str] = []
    while ready:
        key = keys[heapq.heappop(ready)]
        order.append(key)
        for reader in nodes[key].readers:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, position[reader])
    if len(order) < len(nodes):
        stuck = next(key for key in nodes if missing[key] > 0)
        _refuse(path, nodes[stuck].line, f'"{stuck}" lies on or behind a cycle of edges')
    return order


def _carriers(nodes: dict[str, _Node], order: Iterable[str]) -> set[str]:
    """The nodes whose output carries a gradient back."""
    carriers = {key for key, node in nodes.items() if not node.looks_constant}
    for key in order:
        readers = [r for r in nodes[key].readers if nodes[r].readers]
        if key not in carriers or not readers or carriers.intersection(nodes[key].readers):
            continue
        fewest = min(len(nodes[r].readers) for r in readers)
        carriers.update(r for r in readers if len(nodes[r].readers) == fewest)
    return carriers


def _to_profile(
    nodes: dict[str, _Node], order: list[str], model: str, batch_size: int
) -> ModelProfile:
    number = {key: index for index, key in enumerate(order)}
    carriers = _carriers(nodes, order)
    tensors = [
        TensorProfile(
            name=f"{nodes[key].name}.out",
            producer=number[key],
            consumers=tuple(sorted(number[reader] for reader in nodes[key].readers)),
            bytes_per_sample=nodes[key].activation_bytes / batch_size,
        )
        for key in order
        if key in carriers and nodes[key].readers
    ]
    layers = [
        LayerProfile(
            name=nodes[key].name,
            forward_seconds=(nodes[key].forward_seconds,),
            backward_seconds=(nodes[key].backward_seconds,),
            parameter_bytes=nodes[key].parameter_bytes,
        )
        for key in order
    ]
    return ModelProfile(
        model=model,
        device="unknown",
        source="text",
        batch_sizes=(batch_size,),
        layers=tuple(layers),
        tensors=tuple(tensors),
    )


def _short(line: str) -> str:
    text = line.strip()
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(path: str, line: int, fact: str) -> NoReturn:
    raise FileError(
        f"{path}, line {line}: {fact}; a node needs {', '.join(_FIELDS)}, an edge two known nodes"
    )
