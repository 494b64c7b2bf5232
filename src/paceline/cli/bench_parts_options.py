"""Options of ``paceline bench parts``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BackendOption",
    "BatchSizeOption",
    "ContextOption",
    "NetworkOption",
    "ProfileOption",
    "RanksOption",
    "RoundsOption",
    "SecondsOption",
    "SizeOption",
    "StepsOption",
    "TorchOption",
    "WorkloadOption",
]

ProfileOption = Annotated[
    Path,
    typer.Option("--profile", metavar="FILE", help="Add what is measured to this profile, or make it."),
]
RanksOption = Annotated[
    int | None, typer.Option(help="Processes on this machine; else 2, or as many as a launcher started.")
]
SizeOption = Annotated[str | None, typer.Option(help="Reference model; else mini.")]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:FUNCTION",
        help="Your own model instead; the function returns (model, loss_of, samples in a batch).",
    ),
]
BatchSizeOption = Annotated[int, typer.Option(help="Windows of a rank's batch, of a reference model.")]
ContextOption = Annotated[int, typer.Option(help="Tokens of a window, of a reference model.")]
BackendOption = Annotated[
    str | None,
    typer.Option(help="What Paceline's exchanges run on: paceline, gloo or nccl; else what fits."),
]
NetworkOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="What is between the ranks, to be kept in the profile.")
]
StepsOption = Annotated[int, typer.Option(help="Steps of computing that are timed.")]
RoundsOption = Annotated[int, typer.Option(help="Repetitions of computing beside exchanges.")]
SecondsOption = Annotated[float, typer.Option(help="Time for an exchange of one size, at most about.")]
TorchOption = Annotated[bool, typer.Option(help="Measure the calls of torch's own DDP too.")]
