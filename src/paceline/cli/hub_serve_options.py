"""Options of ``paceline hub`` alone: where it serves, whom it lets in, and whom it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BandwidthOption",
    "BindOption",
    "ExplodingOption",
    "FolderOption",
    "GapOption",
    "InsecureOption",
    "KeysOption",
    "NewOption",
    "PerturbOption",
    "QuarantineOption",
    "RunOption",
    "ShardOption",
    "SilentAfterOption",
    "SnapshotEveryOption",
    "StrikesOption",
    "UntilOption",
    "WorseOption",
]

BindOption = Annotated[
    str, typer.Option(help="Where workers connect: tcp://HOST:PORT, tcp://*:PORT for all interfaces.")
]
FolderOption = Annotated[
    Path, typer.Option(help="Journal, snapshots and ledger; a run that is there goes on.")
]
RunOption = Annotated[str, typer.Option(help="Name of the run; else drawn, or the one in the folder.")]
NewOption = Annotated[bool, typer.Option("--new", help="Begin a run; refuse a folder that holds one.")]
KeysOption = Annotated[Path | None, typer.Option(help="Folder that keygen made; needed beyond this machine.")]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Let everybody in who can reach the address.")
]
ExplodingOption = Annotated[
    float, typer.Option(help="Refuse updates of so many times the usual norm; 0: none.")
]
WorseOption = Annotated[float, typer.Option(help="Refuse updates whose score got worse by so much.")]
StrikesOption = Annotated[int, typer.Option(help="Refusals of ten after which a worker is in quarantine.")]
QuarantineOption = Annotated[str, typer.Option(help="How long, the first time.")]
PerturbOption = Annotated[
    float, typer.Option(help="Of a population: factor on the learning rate of who is replaced.")
]
GapOption = Annotated[
    float | None, typer.Option(help="Of a population: share ahead at which all join the best early.")
]
ShardOption = Annotated[str, typer.Option(metavar="I/N", help="Which of several hubs this is.")]
BandwidthOption = Annotated[
    str | None, typer.Option(help="Most to send and to receive: 40MB/s, 30% of 1Gbit/s.")
]
SilentAfterOption = Annotated[str, typer.Option(help="Silence after which a worker does not count.")]
SnapshotEveryOption = Annotated[int, typer.Option(help="Updates between snapshots.")]
UntilOption = Annotated[str | None, typer.Option(help="Stop after so long, such as 8h.")]
