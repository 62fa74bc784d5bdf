"""Early backward against GPipe, really run: what `python -m benchmarks.paper.gpipe` measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paper.facts import GPIPE_CELLS
from benchmarks.paper.markdown import bullets, join, paragraph, table
from benchmarks.paper.questions import Answers, Question
from dapple.units import format_bytes, format_seconds

RESULTS = Path(__file__).with_name("gpipe.json")
GOAL_RATIO, GOAL_MEMORY = 0.95, 0.88
"""Of the simulated ratio of throughputs; of GPipe's memory."""
_NAMES = {"gpipe": "GPipe", "dapple": "early backward"}
_RUNS = ("gpipe", "gpipe+recompute", "dapple", "dapple+recompute")
Cell = dict[str, Any]


class Ratio(NamedTuple):
    """Early backward at the most M over GPipe at the largest M that fits.

    Attributes:
        most, largest: the two M.
        measured: throughput over throughput, the median over the rounds.
        lowest, highest: of the rounds.
        simulated: throughput over throughput.
        alone: simulated, with what a rank computes while the other waits taking as much less as was
            measured.
        memory, accounted: mean peak over mean peak, of the meter and of the simulator.
        paper: the paper's throughput and memory.
    """

    most: int
    largest: int
    measured: float
    lowest: float
    highest: float
    simulated: float
    alone: float
    memory: float
    accounted: float
    paper: tuple[float, float]


def questions() -> Iterable[Question[Any]]:
    """None: the measurement is a command of its own, and its results lie beside this file."""
    return ()


def section(answers: Answers) -> str:
    """The results as they were last measured."""
    if not RESULTS.exists():
        return ""
    return account(json.loads(RESULTS.read_text(encoding="utf-8")))


def account(found: Mapping[str, Any]) -> str:
    """Both tables, and where they differ from the paper's."""
    return join(
        "## Early backward against GPipe, really run",
        paragraph(_setting(found)),
        _cells(found["cells"]),
        paragraph(
            """Early backward at its largest M over GPipe at the largest M that fits it. Throughputs
            measured are compared within each round; the median over the rounds, which need not be the
            ratio of the medians above, and in brackets the lowest and the highest:"""
        ),
        _ratios(found),
        bullets(_differences(found)),
        f"A step of M = {found['counts'].split(',')[1]} of both, without recompute and without the cap:",
        "![Two of these steps, simulated and measured](images/really-run.svg)",
    )


def ratio(found: Mapping[str, Any], recompute: bool) -> Ratio:
    """The head of the comparison, from the cells that fit and were timed."""
    suffix = "+recompute" if recompute else ""
    theirs, ours = (
        max(
            (c for c in found["cells"] if c["run"] == name + suffix and c["fits"]),
            key=lambda cell: cell["count"],
        )
        for name in ("gpipe", "dapple")
    )
    factor = ours["count"] / theirs["count"]
    rounds = [factor * a / b for a, b in zip(theirs["seconds"], ours["seconds"], strict=True)]
    paper = [cell for (run, _), cell in GPIPE_CELLS.items() if run == "gpipe" + suffix and cell]
    best = GPIPE_CELLS["dapple" + suffix, 16]
    assert best is not None
    return Ratio(
        most=ours["count"],
        largest=theirs["count"],
        measured=statistics.median(rounds),
        lowest=min(rounds),
        highest=max(rounds),
        simulated=factor * theirs["simulated"] / ours["simulated"],
        alone=factor * _with_speed(theirs, found) / _with_speed(ours, found),
        memory=statistics.mean(ours["measured"]) / statistics.mean(theirs["measured"]),
        accounted=statistics.mean(ours["accounted"]) / statistics.mean(theirs["accounted"]),
        paper=(best[0] / paper[-1][0], best[1] / paper[-1][1]),
    )


def _with_speed(cell: Cell, found: Mapping[str, Any]) -> float:
    return float(cell["simulated"] - cell["alone"] * (1 - 1 / found["speed_alone"]))


def goals(found: Mapping[str, Any]) -> str:
    """Reached or missed, a line each."""
    plain = ratio(found, recompute=False)
    share = plain.measured / plain.simulated
    return "\n".join(
        f"{what}: {'reached' if reached else 'missed'}"
        for what, reached in (
            (
                f"measured over simulated ratio {share:.3f} (at least {GOAL_RATIO})",
                share >= GOAL_RATIO,
            ),
            (
                f"mean memory of the stages {plain.memory:.3f} of GPipe's (at most {GOAL_MEMORY})",
                plain.memory <= GOAL_MEMORY,
            ),
        )
    )


def _setting(found: Mapping[str, Any]) -> str:
    first, second = found["stage_seconds"]
    return f"""*Really run*, by `python -m benchmarks.paper.gpipe`. A BERT with {found["layers"]} blocks
        of width {found["width"]} and {found["length"]} tokens a row ({found["parameters"] / 1e6:.1f} M
        parameters, AdamW) trains in two processes of one thread over the loopback, micro-batches of
        {found["rows"]} rows, policy A. The stages take {format_seconds(first)} and
        {format_seconds(second)} for a micro-batch's forward and backward, a message
        {format_seconds(found["message_seconds"])}. With recompute, {found["recomputed"]} of a stage's
        {found["layers"] // 2} blocks run again, each by itself. The cap on the bytes of a process is
        {format_bytes(found["cap"])}, between what GPipe needs for M = 2 and for M = 3. A run that needs
        more, by the simulator or by the meter, is **out** of memory; all others were timed in the same two
        processes in turn: medians of {found["rounds"]} rounds. Each cell: samples/s, the two stages'
        average peak, and both as multiples of GPipe's at M = 2; below them the paper's multiples."""


def _cells(cells: list[Cell]) -> str:
    counts = sorted({cell["count"] for cell in cells})
    by_place = {(cell["run"], cell["count"]): cell for cell in cells}
    rows = []
    for run in _RUNS:
        texts = [_text(by_place, run, count) for count in counts]
        rows.append([_run_name(run), *texts])
    return table(["run", *(f"M = {count}" for count in counts)], rows)


def _run_name(run: str) -> str:
    name, _, again = run.partition("+")
    return _NAMES[name] + (" + recompute" if again else "")


def _text(cells: Mapping[tuple[str, int], Cell], run: str, count: int) -> str:
    base, unit = cells["gpipe", 2], GPIPE_CELLS["gpipe", 2]
    assert unit is not None
    lines = []
    if (cell := cells.get((run, count))) is not None:
        if not cell["fits"]:
            lines.append(f"**out**, {format_bytes(max(*cell['measured'], *cell['accounted']))}")
        else:
            speed, memory = _speed(cell), statistics.mean(cell["measured"])
            lines.append(f"{speed:.1f}, {format_bytes(memory)}")
            relative = memory / statistics.mean(base["measured"])
            lines.append(f"{speed / _speed(base):.2f}, {relative:.2f}")
    if (run, count) in GPIPE_CELLS:
        theirs = GPIPE_CELLS[run, count]
        told = "out" if theirs is None else f"{theirs[0] / unit[0]:.2f}, {theirs[1] / unit[1]:.2f}"
        lines.append(f"*{told}*")
    return "<br>".join(lines)


def _speed(cell: Cell) -> float:
    return float(cell["count"] * cell["rows"] / statistics.median(cell["seconds"]))


def _ratios(found: Mapping[str, Any]) -> str:
    header = ["M", "throughput, measured:", "simulated:", "measured / simulated:"]
    header += ["the paper:", "memory, measured:", "simulated:", "the paper:"]
    rows = []
    for recompute in (False, True):
        r = ratio(found, recompute)
        rows.append(
            [
                f"{r.most} against {r.largest}" + (", recompute" if recompute else ""),
                f"{r.measured:.2f} ({r.lowest:.2f} to {r.highest:.2f})",
                f"{r.simulated:.2f}",
                f"{r.measured / r.simulated:.1%}",
                *(f"{value:.2f}" for value in (r.paper[0], r.memory, r.accounted, r.paper[1])),
            ]
        )
    return table(header, rows)


def _differences(found: Mapping[str, Any]) -> Iterator[str]:
    plain, again = ratio(found, recompute=False), ratio(found, recompute=True)
    yield (
        f"{plain.measured:.2f}x GPipe's throughput, where M alone gives two equal stages 1.41x and the "
        f"simulator expects {plain.simulated:.2f}x; the paper's 1.60x needs more that a step takes once. "
        "Simulated times are those of a profile that was taken in the same two processes while both were "
        f"busy. A process computes {found['speed_alone']:.2f} times as fast while the other waits, and "
        f"GPipe's wait for longer; with that the simulator expects {plain.alone:.2f}x."
    )
    least, most = _slower(found)
    yield (
        f"The steps themselves took {least:.2f} to {most:.2f} times as long as simulated. What slows all "
        "runs of a round alike cancels in the ratio; what slows one of them is its spread."
    )
    yield (
        f"{plain.memory:.2f}x GPipe's memory: stage 0 holds two micro-batches and stage 1 one, GPipe two "
        f"on both. The simulator is within {_memory_error(found, False):.1%} of the meter without "
        f"recompute, and within {_memory_error(found, True):.1%} with it."
    )
    yield (
        f"With recompute GPipe fits up to M = {again.largest} under this cap (the paper's up to 5, and "
        f"not 8), so that M = {again.most} gains {again.measured:.2f}x, simulated {again.simulated:.2f}x."
    )


def _slower(found: Mapping[str, Any]) -> tuple[float, float]:
    """Measured over simulated step, the least and the most of the cells."""
    cells = (cell for cell in found["cells"] if cell["fits"])
    times = [statistics.median(cell["seconds"]) / cell["simulated"] for cell in cells]
    return min(times), max(times)


def _memory_error(found: Mapping[str, Any], recompute: bool) -> float:
    pairs = [
        pair
        for cell in found["cells"]
        if ("+" in cell["run"]) == recompute
        for pair in zip(cell["accounted"], cell["measured"], strict=True)
    ]
    return max(abs(accounted / measured - 1) for accounted, measured in pairs)
