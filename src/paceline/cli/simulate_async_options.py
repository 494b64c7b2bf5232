"""Options of ``paceline simulate async``, beside those that it shares with the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BadLrOption",
    "BesideOption",
    "ChurnOption",
    "CompressionOption",
    "DelayOption",
    "DifferentOption",
    "EveryOption",
    "ForOption",
    "FragmentsOption",
    "HubLinkOption",
    "JitterOption",
    "LatencyOption",
    "LinkOption",
    "LrOption",
    "OutOption",
    "ParametersOption",
    "ReceiveOption",
    "SeedOption",
    "SendOption",
    "SpeedsOption",
    "SpoilOption",
    "SpreadOption",
    "StepOption",
    "StepsOption",
    "TargetOption",
    "TaskOption",
    "WarmupOption",
    "WorkersOption",
]

WorkersOption = Annotated[int, typer.Option(help="How many machines train.")]
TaskOption = Annotated[
    str, typer.Option(help="What is learnt: linear (least squares, quick), gpt (a tiny GPT on text).")
]
ParametersOption = Annotated[
    str | None,
    typer.Option(help="Messages are as long as those of a model of so many: 20M; else the task's own."),
]
SpeedsOption = Annotated[
    str,
    typer.Option(
        help="Relative ones, repeated to as many as there are workers; 4 is the fastest of 1:1:2:4."
    ),
]
SpreadOption = Annotated[
    float, typer.Option(help="Of steps' times beside: standard deviation of the logarithm, log-normal.")
]
StepOption = Annotated[str, typer.Option(help="Time of a step on the fastest machine.")]
JitterOption = Annotated[
    str, typer.Option(help="Share by which steps differ at random, as a standard deviation.")
]
LinkOption = Annotated[str, typer.Option(help="Of each worker, in each direction.")]
HubLinkOption = Annotated[str | None, typer.Option(help="Of the hub, in each direction; else as a worker's.")]
LatencyOption = Annotated[str, typer.Option(help="From one machine to another.")]
StepsOption = Annotated[
    int | None, typer.Option(help="Of each worker; ends when all have made them, or by --for.")
]
ForOption = Annotated[
    str | None,
    typer.Option("--for", help="Virtual time; else 300 steps of the slowest machine, unless --steps."),
]
EveryOption = Annotated[str, typer.Option(help="k, local steps between sendings; several by commas.")]
DelayOption = Annotated[
    str, typer.Option(help="d, local steps from sending to taking in; several by commas.")
]
FragmentsOption = Annotated[int, typer.Option(help="Parts of the model that are sent in turn.")]
CompressionOption = Annotated[str, typer.Option(help="Of updates: int4, int8, bf16, fp16, none.")]
SendOption = Annotated[str, typer.Option(help="What workers send, by score: all, better, best.")]
ReceiveOption = Annotated[str, typer.Option(help="What they take in, by score: all, better, best.")]
BadLrOption = Annotated[
    str | None,
    typer.Option(
        metavar="WORKER:LR", help="Give a worker, counted from 1, another learning rate; by commas."
    ),
]
DifferentOption = Annotated[
    bool, typer.Option("--different", help="Workers begin from different parameters.")
]
WarmupOption = Annotated[
    int, typer.Option(help="Local steps at the beginning with an exchange at every other one.")
]
ChurnOption = Annotated[
    str | None,
    typer.Option(
        help="Share of workers away at a time (5%), or who leaves and comes: 30s:-3,60s:+3,90s:-hub,95s:+hub."
    ),
]
SpoilOption = Annotated[str, typer.Option(help="Share of messages that are lost, repeated, late or damaged.")]
SeedOption = Annotated[int, typer.Option(help="Of parameters, data, jitter and mishaps.")]
LrOption = Annotated[float | None, typer.Option(help="Learning rate of the task; else one that suits it.")]
TargetOption = Annotated[
    float | None, typer.Option(help="Loss to which the time is told; else what DDP ends with.")
]
BesideOption = Annotated[
    bool, typer.Option("--beside/--no-beside", help="DDP on the same machines as the first row.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write table.csv, result.json and charts of loss and times there."),
]
