"""Options of ``paceline simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AlgorithmOption",
    "BackendOption",
    "BackwardOption",
    "BatchOption",
    "BucketMibOption",
    "CheckpointOption",
    "ContentionOption",
    "EveryOption",
    "GradientsOption",
    "InsideLatencyOption",
    "InsideOption",
    "IntervalOption",
    "JitterOption",
    "JobOption",
    "JobsOption",
    "LatencyOption",
    "LinkOption",
    "ModelOption",
    "MtbfOption",
    "NodesOption",
    "OutOption",
    "ParametersOption",
    "PriceOption",
    "ProfileOption",
    "RanksPerNodeOption",
    "RestartOption",
    "SeedOption",
    "SharesOption",
    "SpeedsOption",
    "SpreadOption",
    "StepOption",
    "StrategyOption",
    "SwitchOption",
    "TopologyOption",
]

StepOption = Annotated[
    str | None,
    typer.Option(help="Computing of a step: a time (250ms), or a file with measured steps, to draw from."),
]
ParametersOption = Annotated[str | None, typer.Option(help="Of the model: 20M, 7B.")]
ModelOption = Annotated[str | None, typer.Option(help="Or its name: tiny … 2.7b, xxl.")]
NodesOption = Annotated[
    str, typer.Option(help="By commas; FIRST:LAST doubles from one to the other, FIRST:LAST:x10 …")
]
RanksPerNodeOption = Annotated[int, typer.Option(help="Devices of a node.")]
BatchOption = Annotated[
    str,
    typer.Option(help="per-rank: --step is a rank's own batch; fixed: of the whole batch on one rank."),
]
SpeedsOption = Annotated[
    str, typer.Option(help="Of nodes, relative, repeated; --step is of the fastest: 1:1:2:4.")
]
SharesOption = Annotated[str, typer.Option(help="Who gets how much work: equal, or by speed.")]
SpreadOption = Annotated[str, typer.Option(help="Of nodes for good, as a standard deviation; log-normal.")]
JitterOption = Annotated[str, typer.Option(help="Of a rank's steps, the same.")]
TopologyOption = Annotated[str, typer.Option(help="Between nodes: star (a switch), ring, tree.")]
LinkOption = Annotated[
    str, typer.Option(help="Of a node, one way: a rate (200Mbit/s) or a name (10gbe, ndr).")
]
LatencyOption = Annotated[str | None, typer.Option(help="Of a message between nodes; else of that link.")]
InsideOption = Annotated[
    str | None, typer.Option(help="Link of a rank inside its node: nvlink4, pcie4, 12GB/s.")
]
InsideLatencyOption = Annotated[
    str | None, typer.Option(help="Of a message inside a node; else of that link.")
]
SwitchOption = Annotated[str | None, typer.Option(help="What the switch carries in all; else no limit.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="All-reduce and contention as measured, instead of links."),
]
BackendOption = Annotated[str, typer.Option(help="Of the profile.")]
AlgorithmOption = Annotated[
    str,
    typer.Option(
        help="auto: the cheapest; ring, tree, doubling, halving-doubling, two-level, two-level-halving."
    ),
]
StrategyOption = Annotated[str, typer.Option(help="flat, bucketed, sharded, full-shard.")]
BucketMibOption = Annotated[float, typer.Option(help="Of a bucket.")]
GradientsOption = Annotated[int, typer.Option(help="Bytes of one on the wire: 4, 2, 1.")]
BackwardOption = Annotated[str, typer.Option(help="Share of computing in which gradients become ready.")]
ContentionOption = Annotated[
    str | None,
    typer.Option(
        help="How many times as long computing takes beside exchanges, and they beside computing: 1.3:1.1; "
        "else as the profile has it, or 1:1."
    ),
]
EveryOption = Annotated[int, typer.Option(help="H, steps between two exchanges (of parameters, above 1).")]
MtbfOption = Annotated[
    str | None, typer.Option(help="Of a node, mean time between failures: 1000d; else none fails.")
]
CheckpointOption = Annotated[str, typer.Option(help="What training waits for one: 30s.")]
IntervalOption = Annotated[
    str, typer.Option(help="Of training between two checkpoints: a time, or auto (Daly's).")
]
RestartOption = Annotated[str, typer.Option(help="From a failure until training goes on: 5min.")]
JobOption = Annotated[
    str | None, typer.Option(help="Computing of the whole job on one node: 10000h; else a week of all.")
]
PriceOption = Annotated[float | None, typer.Option(help="Of an hour of a node.")]
JobsOption = Annotated[int, typer.Option(help="To simulate for each number of nodes.")]
SeedOption = Annotated[int, typer.Option(help="Of everything that is drawn.")]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write table.csv, result.json and a chart by nodes there."),
]
