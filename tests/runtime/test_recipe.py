"""What a job file says becomes what a trainer is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dapple.errors import InputError
from dapple.job import OPTIMIZERS, Job, load_job
from dapple.planner.memory import OPTIMIZER_STATE
from dapple.runtime import Parameters, recipe
from tests.test_job import LEAST


def job_of(tmp_path: Path, text: str) -> Job:
    path = tmp_path / "job.toml"
    path.write_text(LEAST + text, encoding="utf-8")
    return load_job(path)


def named(*names: str) -> Parameters:
    return Parameters({name: nn.Parameter(torch.ones(2, 2)) for name in names})


def squared(output: Any, target: Any) -> torch.Tensor:
    return (output - target).square().mean()


def half_the_rate(optimizer: torch.optim.Optimizer, factor: float) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: factor**n)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_planner_knows_the_state_of_every_optimizer(name: str, tmp_path) -> None:
    """As many bytes per byte of parameters as a step of torch's own makes."""
    job = job_of(tmp_path, f'[optimizer]\nname = "{name}"\narguments = {{ lr = 0.1 }}\n')
    parameter = nn.Parameter(torch.ones(64, 64))
    optimizer = recipe.optimizer_factory(job)(Parameters({"a": parameter}))
    parameter.grad = torch.ones(64, 64)
    optimizer.step()
    state = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
    found = sum(v.nbytes for v in state) / parameter.nbytes
    assert found == pytest.approx(OPTIMIZER_STATE[job.optimizer.state_like], abs=0.05)


def test_sgd_with_momentum_has_a_state_too(tmp_path) -> None:
    """One more copy of the parameters; an optimizer of one's own counts like AdamW."""
    text = '[optimizer]\nname = "SGD"\narguments = { lr = 0.1, momentum = 0.9 }\n'
    assert job_of(tmp_path, text).optimizer.state_like == "momentum"
    assert job_of(tmp_path, '[optimizer]\nname = "a:b"\n').optimizer.state_like == "adamw"


def test_groups_of_a_job(tmp_path) -> None:
    """Options by name pattern, the rest as told."""
    text = """
    [optimizer]
    name = "AdamW"
    arguments = { lr = 0.1, weight_decay = 0.5 }
    [optimizer.groups]
    "*.bias" = { weight_decay = 0.0 }
    "head.*" = { lr = 0.2 }
    """
    optimizer = recipe.optimizer_factory(job_of(tmp_path, text))(named("a.bias", "a.w", "head.w"))
    found = [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [(1, 0.1, 0.0), (1, 0.2, 0.5), (1, 0.1, 0.5)]
    with pytest.raises(InputError, match=r'pattern "head.\*" matches no parameter'):
        recipe.optimizer_factory(job_of(tmp_path, text))(named("a.bias", "a.w"))


def test_schedulers_of_a_job(tmp_path) -> None:
    """A class of torch with its arguments, or a function of one's own; none by default."""
    optimizer = torch.optim.SGD(named("a"), lr=1.0)
    assert recipe.scheduler_factory(job_of(tmp_path, "")) is None
    text = '[scheduler]\nname = "StepLR"\narguments = { step_size = 1, gamma = 0.25 }\n'
    own = f'[scheduler]\nname = "{__name__}:half_the_rate"\narguments = {{ factor = 0.5 }}\n'
    for job_text, rate in ((text, 0.25), (own, 0.5)):
        scheduler = recipe.scheduler_factory(job_of(tmp_path, job_text))(optimizer)
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [rate]
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"] = 1.0


def test_a_loss_of_a_job_brings_its_own_weight(tmp_path) -> None:
    """The workload's loss and what it counts are replaced together."""
    factory = LEAST.replace('factory = "mlp"', 'factory = "gpt"\nLOSS')
    path = tmp_path / "job.toml"
    for loss, weight, wanted in (
        ("", "", False),
        (f'loss = "{__name__}:squared"', "", True),
        (f'loss = "{__name__}:squared"', f'weight = "{__name__}:squared"', True),
    ):
        path.write_text(factory.replace("LOSS", f"{loss}\n{weight}"))
        with torch.device("meta"):
            workload = recipe.workload_factory(load_job(path))()
        assert (workload.loss is squared) == wanted
        if wanted:
            assert workload.weight is (squared if weight else None)
        else:
            assert workload.weight is not None
