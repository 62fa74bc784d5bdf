"""Weights: independent of the plan at the start, under the model's names at the end."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import format_utils

from dapple.errors import FileError, InputError
from dapple.graph import capture
from dapple.runtime.trainer import Trainer
from tests.graph.models import CASES
from tests.runtime import cases
from tests.runtime.threads import on_ranks


@pytest.mark.parametrize("replicas", [(1,), (1, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", list(cases.EXAMPLES))
def test_initial_weights_do_not_depend_on_the_plan(name: str, replicas: tuple[int, ...]) -> None:
    """Pitfall 21: the same seed with 1, 2 or 3 stages gives bitwise the same weights."""
    graph = cases.build(name)
    plan = cases.make_plan(graph, replicas, 12, 2)
    wanted = cases.make_model(name).state_dict()
    states = on_ranks(graph, plan, lambda trainer: dict(trainer.state_dict()))
    found = {n: v for state in states for n, v in state.items()}
    assert set(found) == set(wanted)
    for state in states:
        assert all(torch.equal(value, wanted[n]) for n, value in state.items())


@pytest.mark.parametrize("name", list(cases.EXAMPLES))
def test_every_plan_trains_each_parameter_once(name: str) -> None:
    """Pitfall 23: over all plans of three stages, none is dropped, and only tied ones repeat."""
    graph = cases.build(name)
    tied = {group[0][1]: {layer for layer, _ in group} for group in graph.tied}
    for cuts in itertools.combinations(range(1, graph.num_layers), 2):
        edges = (0, *cuts, graph.num_layers)
        held: Counter[str] = Counter()
        for start, stop in itertools.pairwise(edges):
            held.update(n for n, _ in graph.stage(start, stop).module.named_parameters())
        assert set(held) == set(graph.parameters())
        for parameter, count in held.items():
            layers = tied.get(parameter, {0})
            stages = {sum(layer >= cut for cut in cuts) for layer in layers}
            assert count == len(stages), (parameter, cuts)


def test_a_stage_holds_only_its_own_parameters_gradients_and_moments() -> None:
    """Resident bytes of a rank are those of its own layers: weights, gradients, two moments."""
    graph, example = cases.build("skip"), cases.EXAMPLES["skip"]
    plan = cases.make_plan(graph, (2, 1, 1), 12, 2)

    def work(trainer: Trainer) -> int:
        trainer.step(*example.batch(12, 0))
        return trainer.resident_bytes()

    found = on_ranks(graph, plan, work, lambda p: torch.optim.AdamW(p))
    stages = [plan.stages[0], *plan.stages]
    for bytes_, stage in zip(found, stages, strict=True):
        own = [
            p
            for layer in range(stage.start, stage.stop)
            for p in graph.parameters_of(layer).values()
        ]
        # Adam also counts its steps: 4 bytes per parameter.
        assert bytes_ == sum(4 * p.nbytes + 4 for p in own)


def saved_state(path: Path) -> dict[str, Tensor]:
    """The weights in a file or folder that `save_weights` wrote."""
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in entries.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.mark.parametrize("path", ["weights", "weights.pt", "new/folder/weights.pt"])
@pytest.mark.parametrize("name", ["gpt", "normed", "unused parameter", "two names"])
def test_saved_weights_load_strictly_into_the_plain_model(
    name: str, path: str, tmp_path: Path
) -> None:
    """Under every name of the model's state_dict: tied, unused and buffers too (pitfall 20)."""
    case = CASES[name]
    graph = capture(case.model(), case.batch(3)[0], loss=case.loss)

    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(*case.batch(8, 0))
        trainer.save_weights(tmp_path / path)
        return dict(trainer.state_dict())

    (trained,) = on_ranks(graph, cases.make_plan(graph, (1,), 8, 2), work)
    plain = case.model(seed=11)
    plain.load_state_dict(saved_state(tmp_path / path), strict=True)
    for n, value in plain.state_dict().items():
        assert torch.equal(value, trained[n]), n
    assert [p.name for p in (tmp_path / path).parent.iterdir()] == [Path(path).name]


def test_a_path_that_cannot_be_written_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    """A typed error on every rank, also if only another one can't; then training goes on."""
    (tmp_path / "file").write_text("")
    graph, example = cases.build("mlp"), cases.EXAMPLES["mlp"]

    def work(trainer: Trainer) -> None:
        below = tmp_path / "file" / "weights.pt"
        with pytest.raises(FileError, match=r"cannot write .*weights.pt: .*; choose another path"):
            trainer.save_weights(below)
        with pytest.raises(FileError, match="it is a file, and a folder is to be made"):
            trainer.save_weights(tmp_path / "file")
        mine = below if trainer.rank == 1 else tmp_path / "weights.pt"
        told = r"rank 1 cannot write .*; choose a path that" if trainer.rank == 0 else "choose"
        with pytest.raises(FileError, match=told):
            trainer.save_weights(mine)
        trainer.step(*example.batch(12, 0))

    on_ranks(graph, cases.make_plan(graph, (1, 1), 12, 2), work)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_weights_that_do_not_fit_are_told_and_the_old_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the parts of the ranks fail, or the file that is made of them."""
    graph = cases.build("mlp")

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def work(trainer: Trainer) -> None:
        trainer.save_weights(tmp_path / "weights.pt")
        monkeypatch.setattr(format_utils, "dcp_to_torch_save", is_full)
        with pytest.raises(FileError, match=r"weights.pt: No space left on device; choose"):
            trainer.save_weights(tmp_path / "weights.pt")
        (tmp_path / "weights" / ".metadata" / "taken").mkdir(parents=True)
        with pytest.raises(FileError, match=r"weights: .* directory.*; choose another path"):
            trainer.save_weights(tmp_path / "weights")

    on_ranks(graph, cases.make_plan(graph, (1,), 12, 2), work)
    assert saved_state(tmp_path / "weights.pt")


def test_after_close_a_call_is_refused_and_weights_can_still_be_saved(tmp_path: Path) -> None:
    """Nobody watches the ranks any more: a failure of one would leave the others waiting."""
    graph, (x, y) = cases.build("mlp"), cases.EXAMPLES["mlp"].batch(12, 0)

    def work(trainer: Trainer) -> None:
        trainer.close()
        calls = {
            "step": lambda: trainer.step(x, y),
            "evaluate": lambda: trainer.evaluate(x, y),
            "predict": lambda: trainer.predict(x),
        }
        for name, call in calls.items():
            with pytest.raises(InputError, match=rf"{name} was called after close\(\), .*; close"):
                call()
        trainer.save_weights(tmp_path / "weights.pt")

    on_ranks(graph, cases.make_plan(graph, (1,), 12, 2), work)
    assert saved_state(tmp_path / "weights.pt")
