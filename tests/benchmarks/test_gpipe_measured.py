"""The comparison with GPipe that is really run: on little, and how its results are told."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from benchmarks.paper.gpipe_measured import account, goals, ratio

from tests.docs.blocks import ROOT


def cell(run: str, count: int, seconds: float | None, peaks: tuple[int, int]) -> dict[str, Any]:
    """A cell of the results, simulated to take as long as it took."""
    return {
        "run": run,
        "count": count,
        "rows": 2,
        "accounted": list(peaks),
        "measured": list(peaks),
        "simulated": seconds or 1.0,
        "alone": 2.0,
        "fits": seconds is not None,
        "seconds": None if seconds is None else [seconds, 2 * seconds, seconds],
    }


def results() -> dict[str, Any]:
    """Two equal stages whose forward and backward take a second, and nothing besides."""
    mib = 2**20
    return {
        "rounds": 3, "rows": 2, "width": 8, "layers": 8, "heads": 2, "length": 8, "recomputed": 3, "counts": "2,5,16",
        "parameters": 1000, "speed_alone": 1.25, "cap": 115 * mib, "stage_seconds": [1.0, 1.0], "message_seconds": 0.0,
        "cells": [
            cell("gpipe", 2, 3.0, (100 * mib, 100 * mib)),
            cell("gpipe", 3, None, (125 * mib, 125 * mib)),
            cell("gpipe+recompute", 5, 8.0, (110 * mib, 110 * mib)),
            cell("dapple", 2, 3.0, (100 * mib, 75 * mib)),
            cell("dapple", 16, 17.0, (100 * mib, 75 * mib)),
            cell("dapple+recompute", 16, 22.7, (70 * mib, 60 * mib)),
        ],
    }  # fmt: skip


def test_the_ratio_is_of_samples_a_second_and_of_the_stages_mean_memory() -> None:
    """17 micro-batches' time for 16, against 3 for 2: 1.41, with 7/8 of the memory."""
    found = ratio(results(), recompute=False)
    assert (found.most, found.largest) == (16, 2)
    assert found.measured == found.simulated == pytest.approx((3 / 2) / (17 / 16))
    assert found.memory == found.accounted == 0.875
    # Two of the seconds of each step are computed alone: 2 / 1.25 = 1.6.
    assert found.alone == pytest.approx((2.6 / 2) / (16.6 / 16))
    assert found.paper == pytest.approx((8.18 / 5.10, 10.6 / 12.1))
    assert ratio(results(), recompute=True).paper == pytest.approx((6.77 / 5.53, 8.5 / 13.2))


def test_rounds_that_differ_show_in_the_ratio() -> None:
    """A GPipe step that took a third less in one round: the median stays, the lowest does not."""
    found = results()
    found["cells"][0]["seconds"][0] = 2.0
    measured = ratio(found, recompute=False)
    assert measured.measured == measured.highest == pytest.approx((3 / 2) / (17 / 16))
    assert measured.lowest == pytest.approx(measured.measured * 2 / 3)


def test_the_simulators_error_is_told_with_and_without_recompute() -> None:
    """Ten per cent too much with it, none without."""
    found = results()
    found["cells"][2]["accounted"] = [peak * 11 // 10 for peak in found["cells"][2]["measured"]]
    text = " ".join(account(found).split())
    assert "within 0.0% of the meter without recompute, and within 10.0% with it" in text


def test_the_account_has_each_cell_beside_the_papers() -> None:
    """As multiples of GPipe's at M = 2; what needs more than the cap is out of memory."""
    text = account(results())
    (gpipe,) = [line for line in text.splitlines() if line.startswith("| GPipe |")]
    assert "**out**, 125.0 MiB" in gpipe
    (ours,) = [line for line in text.splitlines() if line.startswith("| early backward |")]
    assert "1.41, 0.88<br>*1.60, 0.88*" in ours
    assert goals(results()).count("reached") == 2
    assert "| 1.41 (1.41 to 1.41) | 1.41 |" in text
    assert "took 1.00 to 1.00 times as long as simulated" in " ".join(text.split())
    slow = results()
    slow["cells"][4]["simulated"] = 16.0
    assert "took 1.00 to 1.06 times as long as simulated" in " ".join(account(slow).split())
    assert "0.941 (at least 0.95): missed" in goals(slow)


def test_gpipe_and_early_backward_really_run(tmp_path) -> None:
    """A tiny model: what the simulator and the meter say of memory, and what fits and was timed."""
    output, picture = tmp_path / "gpipe.json", tmp_path / "steps.svg"
    sizes = {"width": 32, "layers": 2, "heads": 2, "length": 32, "recomputed": 1, "rounds": 1}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.paper.gpipe", "--counts=2,3,4"),
            *(f"--{name}={value}" for name, value in sizes.items()),
            *(f"--output={output}", f"--picture={picture}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    cells = {(c["run"], c["count"]): c for c in found["cells"]}
    assert 0 < cells["gpipe", 2]["alone"] < cells["gpipe", 2]["simulated"]
    assert cells["gpipe", 2]["fits"]
    assert not cells["gpipe", 3]["fits"]
    assert cells["dapple", 4]["fits"]
    assert all((c["seconds"] is not None) == c["fits"] for c in found["cells"])
    for run, count in ("gpipe", 2), ("gpipe", 4), ("dapple", 4):
        c = cells[run, count]
        assert c["accounted"] == pytest.approx(c["measured"], rel=0.1)
    assert max(cells["gpipe", 4]["measured"]) > max(cells["dapple", 4]["measured"])
    assert ratio(found, recompute=False).most == 4
    assert "Early backward, measured" in picture.read_text("utf-8")
