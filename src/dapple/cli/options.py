"""Options that several verbs take, with one name and one help text each."""

from __future__ import annotations

from typing import Annotated

import typer

PlanFile = Annotated[str, typer.Argument(help="A plan file.")]
ProfileOfPlan = Annotated[str, typer.Option("--profile", help="The profile it was made from.")]
ProfileBatchSize = Annotated[int | None, typer.Option(help="Batch size of a text profile.")]
FactoryArguments = Annotated[
    str, typer.Option("--args", help="Arguments of the model's factory, as JSON.")
]

# What is planned: `plan` and `compare`.
ClusterName = Annotated[
    str, typer.Option("--cluster", help="A cluster file, a preset, or local:2.")
]
GlobalBatchSize = Annotated[int, typer.Option("--global-batch-size", help="Rows of a step.")]
MicroBatchSize = Annotated[
    int | None, typer.Option(help="Rows of a micro-batch; chosen by default.")
]
Memory = Annotated[str | None, typer.Option(help='Memory of each device, such as "110 MiB".')]
Optimizer = Annotated[str, typer.Option(help="Whose state takes memory.")]
NetworkModel = Annotated[
    str | None, typer.Option(help="shared or paper; the cluster's by default.")
]
