"""Options of ``paceline bench collectives``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BackendsOption",
    "CompareOption",
    "DtypeOption",
    "IterationsOption",
    "NetworkOption",
    "OpsOption",
    "OutOption",
    "RanksOption",
    "RendezvousOption",
    "ResumeOption",
    "SecondsOption",
    "SizesOption",
    "WarmupOption",
]

BackendsOption = Annotated[
    str | None,
    typer.Option(
        help="gloo, paceline, paceline:arena, mpi4py, nccl, schedule:ring …, by commas; else the usual ones."
    ),
]
OpsOption = Annotated[
    str,
    typer.Option(help="all-reduce, reduce-scatter, all-gather, broadcast, all-to-all, send-recv, by commas."),
]
RanksOption = Annotated[
    str | None,
    typer.Option(help="Numbers of processes, by commas; else 2,4,6, or as many as a launcher started."),
]
SizesOption = Annotated[
    str | None,
    typer.Option(help="By commas, or a sweep 64KiB:64MiB:x2; else 1MB,10MB,100MB,1024MB as far as they fit."),
]
DtypeOption = Annotated[str, typer.Option(help="float32, float64, int32, int64, float16 or bfloat16.")]
WarmupOption = Annotated[int, typer.Option(help="Calls before the timed ones.")]
IterationsOption = Annotated[
    int | None,
    typer.Option(help="Timed calls of each backend at each size; else as many as --seconds hold."),
]
SecondsOption = Annotated[float, typer.Option(help="Time for each backend at each size; 5 to 1000 calls.")]
RendezvousOption = Annotated[str, typer.Option(help="Where the ranks meet: file or tcp.")]
NetworkOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="What is between the ranks, to be kept in the result.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write JSON, CSV and two charts per operation there."),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Go on with a measurement in --out or --json that was interrupted."),
]
CompareOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A.json B.json", help="Measure nothing; show two results beside each other."),
]
