"""HPGO 0.9.2 itself: run by a Python that has it, or what it answered when it was last run.

The package needs Python 3.7 (`pip install HPGO graphviz`), so it runs in a process of its own. It is
told a text profile and where machines end; the network's figures are built into it, and are those of
`dapple.planner.hpgo.released_network`. Its answers are kept in hpgo-0.9.2.json beside this file.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dapple.planner.hpgo import BatchCosts
from dapple.planner.layout import Layout
from dapple.planner.problem import Problem

RECORD = Path(__file__).with_name("hpgo-0.9.2.json")
SECONDS = 3600
"""How long the package may think about one question."""
_SCRIPT = """
import json, sys
import HPGO
path, rows, batch, ends = json.loads(sys.argv[1])
asked = HPGO.conductor_from_torch_graph_and_seps(path, rows, batch, ends)
print("answer " + json.dumps(asked.py_orchestrate()))
"""
_NODE = re.compile(r"^(\w+) -- (.+?) -- (.*=.*)$")
_FIELD = re.compile(r"(\w+)=(\[.*?\]|[^,\s]+)")


@dataclass(frozen=True)
class Answer:
    """What the package said.

    Attributes:
        model, batch, machines: the question; machines by their number of devices.
        score: its speed-up over one device.
        last: the last layer of every stage but the last one.
        devices: of each stage.
        seconds: how long it took on some machine.
    """

    model: str
    batch: int
    machines: tuple[int, ...]
    score: float
    last: tuple[str, ...]
    devices: tuple[tuple[int, ...], ...]
    seconds: float

    def layouts(self, problem: Problem) -> Iterator[Layout]:
        """The plan for every number of micro-batches."""
        names = [layer.name for layer in problem.profile.layers]
        bounds = (0, *(names.index(name) + 1 for name in self.last), len(names))
        for count in problem.micro_batch_counts:
            yield Layout(bounds, self.devices, count)


def ask(python: str, profile: Path, rows: int, batch: int, machines: Sequence[int]) -> Answer:
    """Run the package.

    Args:
        python: an interpreter that has it.
        profile: a text profile, `NAME-pbs-ROWS.txt`.
        rows: its batch size.
        batch: global batch size.
        machines: devices of each machine.
    """
    question = json.dumps([str(profile), rows, batch, list(itertools.accumulate(machines))])
    begun = time.perf_counter()
    done = subprocess.run(
        [python, "-c", _SCRIPT, question],
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    seconds = time.perf_counter() - begun
    (line,) = re.findall(r"^answer (.*)$", done.stdout, re.MULTILINE)
    # The package plans over states of the graph, each named by the layer that it adds.
    states = re.findall(r'@state: Some\("(.*)"\)', done.stdout)
    score, stages = json.loads(line)
    return Answer(
        profile.name.split("-pbs-")[0],
        batch,
        tuple(machines),
        score,
        tuple(states[stop - 1] for _, stop, _, _ in stages[:-1]),
        tuple(tuple(sorted(devices)) for *_, devices in stages),
        round(seconds, 1),
    )


def recorded() -> list[Answer]:
    """The answers on file."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    return [
        Answer(
            **{
                **row,
                "machines": tuple(row["machines"]),
                "last": tuple(row["last"]),
                "devices": tuple(map(tuple, row["devices"])),
            }
        )
        for row in rows
    ]


def record(answers: Sequence[Answer]) -> None:
    """Put answers on file, a line each."""
    lines = ",\n".join(json.dumps(asdict(answer)) for answer in answers)
    RECORD.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


class Chain(NamedTuple):
    """A text profile as the package sees it: the layers' names and their costs."""

    names: tuple[str, ...]
    costs: BatchCosts


def package_chain(profile: Path, rows: int, batch: int) -> Chain:
    """The chain that the package makes of a text profile, for the whole global batch.

    Unlike our import it lets masks travel over every cut, and counts the time of input nodes that
    are not named "Input".
    """
    nodes: dict[str, int] = {}
    names: list[str] = []
    seconds, parameters, sizes, ends = [], [], [], []
    for line in profile.read_text(encoding="utf-8").splitlines():
        found = _NODE.match(line)
        if found:
            name, fields = found[2], dict(_FIELD.findall(found[3]))
            figures = [_sum(fields[f"{way}_compute_time"]) for way in ("forward", "backward")]
            figures += [_sum(fields["activation_size"]), _sum(fields["parameter_size"])]
            if name.startswith("Input"):
                figures = [0.0] * 4
            nodes[found[1]] = len(nodes)
            names.append(name)
            seconds.append(sum(figures[:2]) / 1e3)
            sizes.append(figures[2])
            parameters.append(figures[3])
            ends.append(0)
        elif line.strip():
            source, target = (nodes[part] for part in line.strip().split(" -- "))
            ends[source] = max(ends[source], target)
    crossing = np.zeros(len(nodes) + 1)
    for number, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        crossing[number + 1 : end + 1] += size
    prefix = [np.concatenate([[0.0], np.cumsum(part)]) for part in (seconds, parameters)]
    more = batch / rows
    costs = BatchCosts(prefix[0] * more, prefix[1], crossing * more, batch)
    return Chain(tuple(names), costs)


def _sum(text: str) -> float:
    return sum(float(part) for part in text.strip("[]").split(";"))
