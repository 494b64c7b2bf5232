"""Options of ``paceline bench step``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BackendOption",
    "BatchSizeOption",
    "ContextOption",
    "MemoryOption",
    "OutOption",
    "RanksOption",
    "RoundsOption",
    "SeedOption",
    "SizeOption",
    "StepsOption",
    "StrategiesOption",
]

RanksOption = Annotated[int, typer.Option(help="Processes on this machine.")]
SizeOption = Annotated[str, typer.Option(help="Reference models, separated by commas.")]
BatchSizeOption = Annotated[int, typer.Option(help="Windows of a rank's batch.")]
ContextOption = Annotated[int, typer.Option(help="Tokens of a window.")]
StepsOption = Annotated[int, typer.Option(help="Steps of a contestant's turn.")]
RoundsOption = Annotated[int, typer.Option(help="Turns of each contestant.")]
StrategiesOption = Annotated[
    str | None, typer.Option(help="Who takes part, separated by commas; torch DDP always does.")
]
BackendOption = Annotated[
    str | None,
    typer.Option(help="What our strategies run on: paceline, gloo, nccl; torch's on gloo or nccl."),
]
MemoryOption = Annotated[
    bool, typer.Option(help="Measure peak memory too, each contestant in processes of its own.")
]
SeedOption = Annotated[int, typer.Option(help="Decides initial weights and batches.")]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Write step.json, step.csv and charts there.")
]
