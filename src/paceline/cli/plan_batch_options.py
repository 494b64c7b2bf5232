"""Options of ``paceline plan batch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "ActivationsOption",
    "BackendOption",
    "BetweenOption",
    "DeviceOption",
    "DevicesOption",
    "DtypeOption",
    "FlopsOption",
    "GradientsOption",
    "GroupOption",
    "LinkOption",
    "MemoryOption",
    "ModelOption",
    "ParametersOption",
    "ProfileOption",
    "SamplesOption",
    "SharedOption",
    "StrategyOption",
    "TokensOption",
    "UsableOption",
]

ModelOption = Annotated[
    str | None, typer.Option(help="By name: tiny … 2.7b, or xxl; brings its sizes along.")
]
ParametersOption = Annotated[str | None, typer.Option(help="Of a model that is not known by name: 7B, 350M.")]
ActivationsOption = Annotated[
    str | None,
    typer.Option(help="That a token saves for backward: 4MB. Else estimated with --model, or left out."),
]
TokensOption = Annotated[int | None, typer.Option(help="Of a sample; else the model's context, or 1.")]
StrategyOption = Annotated[
    str, typer.Option(help="Who keeps what: ddp, zero1, zero2, fsdp (everything shared).")
]
SharedOption = Annotated[str, typer.Option(help="Part of a micro-batch's activations that devices share.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="By name: gtx-1660 … b200; brings memory and FLOP/s along.")
]
MemoryOption = Annotated[str | None, typer.Option(help="Of a device: 80GB.")]
UsableOption = Annotated[str, typer.Option(help="Part of it to plan with.")]
DevicesOption = Annotated[int | None, typer.Option(help="How many there are; else as many as it takes.")]
SamplesOption = Annotated[
    int | None, typer.Option("--batch", metavar="SAMPLES", help="Global batch, in samples.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="Of matrix products: bf16, fp16, tf32, fp32; else the first that the device has."),
]
FlopsOption = Annotated[
    str | None, typer.Option(help="C, a device's FLOP/s: 400T; before profile and table.")
]
LinkOption = Annotated[
    str | None,
    typer.Option(help="W, one way: a name (nvlink4, pcie4, ndr, 10gbe) or a rate (12GB/s)."),
]
GroupOption = Annotated[int, typer.Option(help="Devices of a node, which --link connects; with --between.")]
BetweenOption = Annotated[
    str | None, typer.Option(help="Link of a device between nodes: a name or a rate; else all are alike.")
]
GradientsOption = Annotated[int, typer.Option(help="Bytes of a gradient on the wire: 1, 2 or 4.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="C and W as measured, with their errors: profile.json."),
]
BackendOption = Annotated[str, typer.Option(help="Of the profile: whose all-reduce.")]
