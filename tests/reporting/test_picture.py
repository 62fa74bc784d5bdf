"""Steps as pictures: what is in them, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings

from dapple.errors import FileError, InputError
from dapple.records import Timeline
from dapple.reporting import held_micro_batches, save_picture
from dapple.simulator import simulate
from tests.simulator.pipelines import chain, cluster, plan, random_plans

pytest.importorskip("matplotlib")


def step(replicas=(1, 1), micro_batches=3, **how) -> Timeline:
    """F = 1 s and B = 2 s a row on every stage, and transfers of a quarter of a second."""
    stages = len(replicas)
    profile = chain(
        [1] * stages, [2] * stages, bytes_per_row=0.25, parameter_bytes=4, optimizer_seconds=1.0
    )
    made = plan(
        list(replicas), micro_batches * max(replicas), micro_batches, cluster(sum(replicas))
    )
    return simulate(made, profile, **how)


def texts(path: Path) -> list[str]:
    """The texts of an SVG, in order."""
    return re.findall(r"<text [^>]*>([^<]+)</text>", path.read_text("utf-8"))


@settings(max_examples=40, deadline=None)
@given(random_plans(contended=True))
def test_the_curve_of_held_micro_batches_is_as_high_as_the_schedule_allows(case):
    """Whatever the plan; and nothing is held when the step has ended."""
    timeline = simulate(*case)
    curves = held_micro_batches(timeline)
    for stage, curve in curves.items():
        assert max(held for _, held in curve) <= timeline.in_flight[stage]
        assert curve[-1][1] == 0
        assert all(a[0] < b[0] for a, b in itertools.pairwise(curve))


def test_the_curve_of_a_stage_is_that_of_its_schedule():
    """Two stages, three micro-batches: K = 2 and 1; GPipe holds all three."""
    profile = chain([1, 1], [2, 2])
    made = plan([1, 1], 3, 3, cluster(2, bandwidth=1e30))
    assert held_micro_batches(simulate(made, profile)) == {
        0: [(0, 1), (1, 2), (6, 2), (9, 1), (12, 0)],
        1: [(0, 0), (1, 1), (4, 1), (7, 1), (10, 0)],
    }
    gpipe = held_micro_batches(simulate(made, profile, schedule="gpipe"))
    assert [max(held for _, held in curve) for curve in gpipe.values()] == [3, 3]


def test_a_split_backward_holds_its_micro_batch_until_the_weights_are_done():
    """Zero bubble: as many as the first stage, on every stage."""
    timeline = step((1, 1), 4, schedule="zero-bubble")
    found = held_micro_batches(timeline)
    assert [max(held for _, held in found[s]) for s in (0, 1)] == list(timeline.in_flight) == [2, 2]


def test_a_picture_names_ranks_micro_batches_and_kinds(tmp_path):
    """Each micro-batch stands in its forward and its backward on every rank."""
    path = tmp_path / "step.svg"
    save_picture(path, {"A title": step()})
    found = texts(path)
    for number in "012":
        # Axes have numbers of their own, which are no micro-batches.
        assert found.count(number) >= 4
    for words in ("A title", "rank 0 stage 0", "rank 1 stage 1", "stage 0: at most 2"):
        assert any(words in text for text in found), words
    for kind in ("forward", "backward", "activations sent", "gradients sent", "update"):
        assert kind in found
    assert "AllReduce" not in found


def test_messages_are_activations_before_the_backward_and_gradients_after_it():
    """One of each per micro-batch and boundary."""
    from dapple.reporting.gantt import shown_rows

    rows = shown_rows(step((1, 1, 1), 4), most_rows=3, least=0.0)
    assert [len(row.strips.get("activations", ())) for row in rows] == [4, 4, 0]
    assert [len(row.strips.get("gradients", ())) for row in rows] == [0, 4, 4]


def test_replicas_and_allreduces_are_drawn(tmp_path):
    """A row for each replica; more than 16 ranks are one row per stage."""
    save_picture(tmp_path / "few.svg", {"few": step((2, 1))})
    found = texts(tmp_path / "few.svg")
    assert {"rank 0 stage 0", "rank 1 stage 0.1", "rank 2 stage 1", "AllReduce"} <= set(found)
    save_picture(tmp_path / "many.svg", {"many": step((16, 4))})
    found = [text for text in texts(tmp_path / "many.svg") if ", 1 of" in text]
    assert found == ["stage 0, 1 of 16", "stage 1, 1 of 4"]


def test_steps_in_one_picture_share_the_axis_of_time(tmp_path):
    """The longer one fills it, simulated or measured; a peak that was measured is told."""
    timeline = step()
    update = {"source": "measured", "step_seconds": 30.0, "peak_bytes": (2**20, 2**21)}
    save_picture(
        tmp_path / "two.svg", {"one": timeline, "other": timeline.model_copy(update=update)}
    )
    found = texts(tmp_path / "two.svg")
    assert found.count("30 s") == found.count("25 s") > 0
    assert any("measured step 30 s" in text for text in found)
    assert any("peak 1.0 MiB" in text for text in found)


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_the_same_step_is_the_same_file(kind: str, tmp_path):
    """So that a picture in a repository changes only when the step does."""
    for name in ("a", "b"):
        save_picture(tmp_path / f"{name}.{kind}", {"step": step()})
    first, second = ((tmp_path / f"{n}.{kind}").read_bytes() for n in "ab")
    assert first == second
    assert len(first) > 1000


def test_what_cannot_be_a_picture_is_refused(tmp_path, monkeypatch):
    """With the remedy."""
    with pytest.raises(InputError, match=r"end its name in \.svg"):
        save_picture(tmp_path / "step.txt", {"step": step()})
    with pytest.raises(InputError, match="no spans"):
        save_picture(tmp_path / "step.svg", {"step": step(spans=False)})
    with pytest.raises(InputError, match="at least one"):
        save_picture(tmp_path / "step.svg", {})
    with pytest.raises(InputError, match="65 ranks are too many"):
        save_picture(tmp_path / "step.svg", {"step": step((1,) * 65, 1)})
    with pytest.raises(FileError, match="cannot write"):
        save_picture(tmp_path / "nowhere" / "step.svg", {"step": step()})
    monkeypatch.setattr("dapple.reporting.picture.MOST_SPANS", 10)
    with pytest.raises(InputError, match="spans are too many"):
        save_picture(tmp_path / "step.svg", {"step": step()})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="dapple-parallel\\[pictures\\]"):
        save_picture(tmp_path / "step.svg", {"step": step()})
