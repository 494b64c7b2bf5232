"""Options of ``paceline collective``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AddOption",
    "BackendOption",
    "BetweenOption",
    "BytesOption",
    "CompareOption",
    "DrawOption",
    "HubOption",
    "IterationsOption",
    "LatencyOption",
    "LinkOption",
    "NameArgument",
    "OpOption",
    "PerNodeOption",
    "RanksOption",
    "RootOption",
    "RunOption",
    "SegmentsOption",
    "SharedOption",
    "SlowOption",
    "StreamOption",
    "TopologyOption",
]

NameArgument = Annotated[
    str,
    typer.Argument(help="An algorithm (ring, tree, all-gather/bruck …), or an operation (broadcast …)."),
]
RanksOption = Annotated[int, typer.Option(help="How many take part.")]
BytesOption = Annotated[str, typer.Option("--bytes", help="Size of the vector.")]
LinkOption = Annotated[str, typer.Option(help="Rate of every link, each direction.")]
LatencyOption = Annotated[str, typer.Option(help="Of a message from rank to rank.")]
AddOption = Annotated[
    str | None, typer.Option(help="Rate at which a rank adds, such as 4GB/s; else it costs nothing.")
]
OpOption = Annotated[str | None, typer.Option(help="The operation, where several have such an algorithm.")]
TopologyOption = Annotated[str, typer.Option(help="star, switch, ring, tree or two-level.")]
SharedOption = Annotated[
    str | None, typer.Option(help="Of topology switch: what it carries in all, such as 4Gbit/s.")
]
PerNodeOption = Annotated[int | None, typer.Option(help="Of topology two-level: ranks of a node.")]
BetweenOption = Annotated[
    str | None, typer.Option(help="Of topology two-level: rate of a node's link to the others.")
]
SlowOption = Annotated[
    list[str] | None, typer.Option(metavar="RANK=RATE", help="A link with another rate; may be repeated.")
]
HubOption = Annotated[int | None, typer.Option(help="Of a star: the rank that is its switch.")]
RootOption = Annotated[int, typer.Option(help="Who broadcasts, or gets what is reduced.")]
SegmentsOption = Annotated[
    str, typer.Option(help="Pieces of a chunk that follow each other; auto: as many as pay.")
]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Rank all algorithms of the operation, best first.")
]
RunOption = Annotated[
    str, typer.Option(help="here: processes on this machine; lab: hosts with such links; else none.")
]
BackendOption = Annotated[str, typer.Option(help="Carries the messages of --run: gloo or paceline.")]
IterationsOption = Annotated[int, typer.Option(help="How often --run carries out each.")]
StreamOption = Annotated[
    bool, typer.Option("--stream", help="Let --run send pieces on at once, not round by round.")
]
DrawOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it there: .png or .svg.")]
