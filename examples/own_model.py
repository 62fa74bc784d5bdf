"""A model of your own: `dapple` is told how to make it and what batches look like.

Run from the folder of this file:

    dapple profile own_model:workload --devices 2 -o runs/own/profile.json
    dapple plan --profile runs/own/profile.json --cluster local:2 --global-batch-size 32 \
        --planner straight -o runs/own/plan.json
    torchrun --nproc-per-node 2 own_model.py runs/own/plan.json
"""

import sys

import torch
from torch import nn

import dapple


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu_(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def workload() -> dapple.Workload:
    torch.manual_seed(0)  # the same weights on every rank
    return dapple.Workload(
        name="net",
        model=Net(),
        inputs=lambda rows: (torch.randn(rows, 64),),
        targets=lambda rows: torch.randint(0, 10, (rows,)),
        loss=nn.functional.cross_entropy,
    )


def main() -> None:
    work = workload()
    plan = dapple.load_record(dapple.Plan, sys.argv[1])
    graph = dapple.capture(work.model, work.inputs(4), loss=work.loss, name=work.name)
    trainer = dapple.Trainer(graph, plan, lambda p: torch.optim.AdamW(p, lr=1e-3))
    batch = torch.Generator().manual_seed(0)
    for step in range(40):
        x = torch.randn(32, 64, generator=batch)  # the same batch on every rank
        result = trainer.step(x, x[:, :10].argmax(dim=1))
        if trainer.rank == 0:
            print(f"step {step:2} loss {result.loss:.3f}")
    trainer.save_weights("runs/own/weights.pt")


if __name__ == "__main__":
    main()
