"""What only real processes show: memory of a rank, weights written together, masks of replicas."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dapple.graph import capture
from dapple.runtime.trainer import Trainer
from tests.distributed.harness import note_action, run_ranks
from tests.graph.models import CASES, Dropped
from tests.runtime import cases
from tests.runtime.test_weights import saved_state
from tests.runtime.threads import OwnCopy

WIDTH = 256


def work(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """All that the tests below look at, from one rank."""
    found = {}
    for action in (memory_of_a_stage, saved_weights, masks, mixed_precision):
        note_action(action.__name__)
        found[action.__name__] = action(folder)
    return found


def memory_of_a_stage(folder: Path) -> dict[str, Any]:
    """Live bytes after start-up and a step; the model is real, and its other parts are freed."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    graph = capture(model, torch.randn(2, WIDTH), loss=F.mse_loss)
    plan = cases.make_plan(graph, (2, 1), 4, 2)
    trainer = Trainer(graph, plan, lambda p: torch.optim.AdamW(p), device=torch.device("cpu"))
    at_start = live_bytes()
    trainer.step(torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    layers = trainer.topology.stage_plan.stop - trainer.topology.stage_plan.start
    trainer.close()
    return {
        "parameters": layers * 4 * (WIDTH * WIDTH + WIDTH),
        "number": layers * 2,
        "at start": at_start,
        "after a step": live_bytes(),
        "resident": trainer.resident_bytes(),
    }


def mixed_precision(folder: Path) -> dict[str, Any]:
    """A step under bf16 with clipping and a metric, then a prediction."""
    graph = capture(
        CASES["gpt"].model().float(), torch.zeros(2, 5, dtype=torch.int64), loss=gpt_loss
    )
    trainer = Trainer(
        graph,
        cases.make_plan(graph, (2, 1), 6, 2),
        lambda p: torch.optim.SGD(p, lr=0.1),
        device=torch.device("cpu"),
        precision="bf16",
        clip_norm=1e-3,
        metrics={"largest": largest},
    )
    tokens, targets = gpt_batch()
    result = trainer.step(tokens, targets, metrics=True)
    output = trainer.predict(tokens)
    trainer.close()
    return {
        "loss": result.loss,
        "norm": result.gradient_norm,
        "metrics": dict(result.metrics),
        "output": output,
        "copies": trainer.state_dict().get("embed.weight"),
    }


def gpt_batch() -> tuple[Tensor, Tensor]:
    tokens, targets = CASES["gpt"].batch(6)
    return tokens, targets


def gpt_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def largest(output: Tensor, targets: Tensor) -> Tensor:
    return output.max(-1).values.float().mean()


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and type(thing) in (Tensor, nn.Parameter):
            if thing.device.type == "meta":
                continue
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """Trains with two replicas and one, and writes the weights in both ways."""
    case = CASES["gpt"]
    graph = capture(case.model(), case.batch(3)[0], loss=case.loss)
    plan = cases.make_plan(graph, (2, 1), 8, 2)
    trainer = Trainer(graph, plan, lambda p: torch.optim.AdamW(p), device=torch.device("cpu"))
    trainer.step(*case.batch(8))
    trainer.save_weights(folder / "weights")
    trainer.save_weights(folder / "weights.pt")
    trainer.close()
    return {name: value.clone() for name, value in trainer.state_dict().items()}


def masks(folder: Path) -> list[dict[str, Any]]:
    """Two equal runs with dropout on three replicas, and two on a pipeline."""
    seen: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.detach().clone())
        return F.mse_loss(output, target)

    torch.manual_seed(0)
    graph = capture(Dropped().double(), torch.randn(3, 6).double(), loss=loss)
    results = []
    for replicas in [(3,), (3,), (1, 2), (1, 2)]:
        torch.manual_seed(torch.seed())
        seen.clear()
        plan = cases.make_plan(graph, replicas, 6, 2)
        trainer = Trainer(
            OwnCopy(graph),  # type: ignore[arg-type]
            plan,
            lambda p: torch.optim.SGD(p, lr=0.1),
            device=torch.device("cpu"),
            seed=5,
        )
        # Equal rows: pieces differ by their masks only.
        trainer.step(torch.ones(6, 6).double(), torch.ones(6, 6).double())
        weights = {name: value.clone() for name, value in trainer.state_dict().items()}
        trainer.close()
        results.append({"outputs": list(seen), "weights": weights})
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(3, work, folder, timeout_seconds=120)


def test_a_rank_holds_only_its_own_stage(ranks: list[dict[str, Any]]) -> None:
    """Parameters and gradients after start-up, moments after a step: of its own layers only."""
    for rank in ranks:
        memory = rank["memory_of_a_stage"]
        # Adam counts its steps, 4 bytes per parameter; batches and constants are far below a layer.
        assert memory["resident"] == 4 * memory["parameters"] + 4 * memory["number"]
        spare = 4 * WIDTH * WIDTH // 8
        assert 2 * memory["parameters"] <= memory["at start"] < 2 * memory["parameters"] + spare
        assert memory["resident"] <= memory["after a step"] < memory["resident"] + spare


@pytest.mark.parametrize("name", ["weights", "weights.pt"])
def test_weights_of_several_ranks_load_strictly_into_the_plain_model(
    name: str, ranks: list[dict[str, Any]], folder: Path
) -> None:
    """Two replicas and a tied weight over two stages: every name once, with the trained values."""
    plain = CASES["gpt"].model(seed=11)
    plain.load_state_dict(saved_state(folder / name), strict=True)
    trained = {n: v for rank in ranks for n, v in rank["saved_weights"].items()}
    state = plain.state_dict()
    assert set(state) == set(trained)
    assert all(torch.equal(value, trained[n]) for n, value in state.items())
    assert torch.equal(state["embed.weight"], state["head.weight"])


def test_only_the_weights_are_left_in_the_folder(ranks: list[dict[str, Any]], folder: Path) -> None:
    """The pieces from which one file is put together are gone."""
    assert sorted(path.name for path in folder.iterdir()) == ["weights", "weights.pt"]


def test_replicas_do_not_share_masks(ranks: list[dict[str, Any]]) -> None:
    """Equal rows on equal weights come out differently on each replica and in each micro-batch."""
    pieces = [output for rank in ranks for output in rank["masks"][0]["outputs"]]
    assert len(pieces) == 6
    for i, piece in enumerate(pieces):
        assert not any(torch.equal(piece, other) for other in pieces[i + 1 :])


@pytest.mark.parametrize("first", [0, 2], ids=["replicas", "pipeline"])
def test_dropout_repeats_bitwise(first: int, ranks: list[dict[str, Any]]) -> None:
    """The same plan and seed give the same outputs and weights, whatever else drew numbers."""
    for rank in ranks:
        one, other = rank["masks"][first : first + 2]
        assert len(one["outputs"]) == len(other["outputs"])
        for mine, its in zip(one["outputs"], other["outputs"], strict=True):
            assert torch.equal(mine, its)
        assert all(torch.equal(value, other["weights"][n]) for n, value in one["weights"].items())


def test_mixed_precision_clipping_and_prediction_over_a_real_network(
    ranks: list[dict[str, Any]],
) -> None:
    """bf16 messages, a norm with a tied weight, outputs as bytes: as on one process, on each rank."""
    model = CASES["gpt"].model().float()
    tokens, targets = gpt_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(tokens)
        loss = gpt_loss(output, targets)
    mean = largest(output, targets).item()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = model.eval()(tokens)
    for found in (rank["mixed_precision"] for rank in ranks):
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-3)
        assert found["norm"] == pytest.approx(norm.item(), rel=1e-2)
        assert found["metrics"] == pytest.approx({"largest": mean}, rel=1e-2)
        assert found["output"].dtype == predicted.dtype
        assert (found["output"] - predicted).abs().max() < 2e-2
        assert torch.equal(found["output"], ranks[0]["mixed_precision"]["output"])
    copies = [c for rank in ranks if (c := rank["mixed_precision"]["copies"]) is not None]
    assert len(copies) == 3
    assert all(torch.equal(copy, copies[0]) for copy in copies)
