"""Options of ``paceline train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.lm.sizes import SIZES
from paceline.sync.compress import COMPRESSIONS
from paceline.sync.plan import STRATEGIES
from paceline.train.apart import OUTERS

__all__ = [
    "BatchSizeOption",
    "BucketMibOption",
    "CheckpointEveryOption",
    "ClipOption",
    "CompressionOption",
    "ContextOption",
    "DataOption",
    "DelayOption",
    "DeviceOption",
    "EvalEveryOption",
    "EveryOption",
    "FragmentsOption",
    "LrOption",
    "MaxRestartsOption",
    "MinRanksOption",
    "OutOption",
    "OuterLrOption",
    "OuterMomentumOption",
    "OuterOption",
    "OverwriteOption",
    "RanksOption",
    "ResumeOption",
    "SeedOption",
    "SizeOption",
    "StepsOption",
    "SyncOption",
    "ThreadsOption",
    "VocabularyOption",
    "WarmupOuterOption",
]

RanksOption = Annotated[int | None, typer.Option(help="Processes; 2, or as many as torchrun started.")]
MinRanksOption = Annotated[
    int | None, typer.Option(help="Go on with so many after failures; else with all only.")
]
MaxRestartsOption = Annotated[
    int, typer.Option(help="Failures after which it goes on from the last checkpoint.")
]
SizeOption = Annotated[str, typer.Option(help=f"Model: {', '.join(SIZES)}.")]
DataOption = Annotated[
    Path | None,
    typer.Option(help="Text file, folder, or nanoGPT .bin; else the Python standard library's sources."),
]
VocabularyOption = Annotated[int | None, typer.Option(help="Tokens of the model; else what the data need.")]
ContextOption = Annotated[int | None, typer.Option(help="Tokens of a window; else the model's own.")]
BatchSizeOption = Annotated[int, typer.Option(help="Windows of a rank's micro-batch.")]
StepsOption = Annotated[int, typer.Option(help="Optimizer steps.")]
LrOption = Annotated[float, typer.Option(help="Largest learning rate.")]
ClipOption = Annotated[float, typer.Option(help="Largest norm of the gradient; 0: any.")]
SyncOption = Annotated[
    str | None,
    typer.Option(
        help=f"Strategy: {', '.join(STRATEGIES)}, or auto: what fits the measured network, tuned while it trains. "
        "Else sharded; with --every or --compression bucketed."
    ),
]
BucketMibOption = Annotated[float | None, typer.Option(help="Bucket size in MiB; else the strategy's.")]
CompressionOption = Annotated[
    str | None, typer.Option(help=f"Of what is sent: {', '.join(COMPRESSIONS)}, none.")
]
EveryOption = Annotated[
    int | None,
    typer.Option(metavar="H", help="Synchronise parameters every H steps; else gradients every step."),
]
OuterOption = Annotated[
    str | None,
    typer.Option(help=f"Of --every, what becomes of the mean: {', '.join(OUTERS)}; else average."),
]
OuterLrOption = Annotated[float | None, typer.Option(help="Of --outer diloco (0.7) and slowmo (1).")]
OuterMomentumOption = Annotated[float | None, typer.Option(help="Of diloco (0.9) and slowmo (0.5).")]
FragmentsOption = Annotated[
    int | None, typer.Option(help="Of --every: parts of the model that are sent in turn; else 1.")
]
DelayOption = Annotated[
    int | None, typer.Option(help="Of --every: steps from sending a part to merging it; else 0.")
]
WarmupOuterOption = Annotated[
    int | None, typer.Option(help="Of --outer: steps before its momentum starts; else 0.")
]
SeedOption = Annotated[int, typer.Option(help="Decides initial weights and order of data.")]
EvalEveryOption = Annotated[int, typer.Option(help="Steps between held-out losses; 0: first and last.")]
CheckpointEveryOption = Annotated[int, typer.Option(help="Steps between checkpoints; 0: last.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads of a rank; else its share of the cores.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; else a GPU where there is one.")]
OutOption = Annotated[Path, typer.Option(help="Folder for log, checkpoint and report.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")]
