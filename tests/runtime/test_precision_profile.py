"""A profile taken under autocast: bytes as autocast makes them, weights cast once per step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dapple.costs import CostModel, stage_memory
from dapple.graph import LayerGraph, capture
from dapple.graph.precision import PrecisionName
from dapple.profiler import measure_profile
from dapple.records import Plan
from dapple.runtime.trainer import Trainer
from dapple.workload import Workload
from tests.runtime import cases
from tests.runtime.threads import on_ranks

WIDTH, ROWS, MICRO_BATCHES = 128, 64, 4


def deep() -> tuple[Workload, LayerGraph]:
    """Weights that take more memory than what a micro-batch keeps."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
    workload = Workload(
        "deep",
        nn.Sequential(*blocks, nn.Linear(WIDTH, 8)),
        lambda rows: (torch.randn(rows, WIDTH),),
        lambda rows: torch.randn(rows, 8),
        nn.functional.mse_loss,
    )
    graph = capture(workload.model, workload.inputs(4), loss=workload.loss, name="deep")
    return workload, graph


def measured_peaks(
    workload: Workload, graph: LayerGraph, plan: Plan, precision: PrecisionName
) -> list[int]:
    torch.manual_seed(1)
    rows = ROWS * MICRO_BATCHES
    batch = (workload.inputs(rows)[0], workload.targets(rows))

    def work(trainer: Trainer) -> int:
        trainer.step(*batch)
        with trainer.measure_memory() as meter:
            trainer.step(*batch)
        return meter.peak_bytes

    return on_ranks(graph, plan, work, cases.OPTIMIZERS["adamw"], precision=precision)


@pytest.mark.parametrize("schedule", ["early-backward", "gpipe"])
def test_memory_under_autocast_is_what_the_plan_of_such_a_profile_says(schedule: str) -> None:
    """One rank, float32 and bf16 each by its own profile."""
    for precision in ("float32", "bf16"):
        workload, graph = deep()
        profile = measure_profile(
            graph, workload, batch_sizes=(ROWS,), rounds=1, precision=precision
        )
        plan = cases.make_plan(graph, (1,), ROWS * MICRO_BATCHES, MICRO_BATCHES, schedule)
        in_flight = MICRO_BATCHES if schedule == "gpipe" else 1
        expected = stage_memory(CostModel(profile, plan.cluster), plan.stages, 0, ROWS, in_flight)
        assert expected is not None
        (peak,) = measured_peaks(workload, graph, plan, precision)
        assert peak == pytest.approx(expected.total, rel=0.05), (precision, expected)


def test_weights_cast_by_autocast_count_once_and_tensors_between_layers_in_its_type() -> None:
    """A linear layer's weight and bias in two bytes each; what crosses a cut takes half."""
    workload, graph = deep()
    plain = measure_profile(graph, workload, batch_sizes=(2, 4), rounds=1)
    cast = measure_profile(graph, workload, batch_sizes=(2, 4), rounds=1, precision="bf16")
    assert [layer.cast_bytes for layer in plain.layers] == [0] * plain.num_layers
    assert cast.layers[1].cast_bytes in (2 * WIDTH * WIDTH, 2 * WIDTH * WIDTH + 2 * WIDTH)
    for one, other in zip(plain.tensors, cast.tensors, strict=True):
        assert other.bytes_per_sample == one.bytes_per_sample / 2
    first, second = cast.layers[1].saved_bytes or (0, 0)
    assert second == 2 * first, "what is kept of weights does not grow with micro-batches"
    assert cast.dtype == "float32, autocast bf16"
