"""Options that say how a training is set up, of several commands that plan, measure or run one."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "AccumulateOption",
    "AutocastOption",
    "BucketsOption",
    "CheckpointingOption",
    "NetworkOption",
    "OptimizerOption",
    "ThreadsOption",
]

OptimizerOption = Annotated[str, typer.Option(help="adamw, sgd, sgd-momentum, or package.module:Class.")]
AutocastOption = Annotated[str, typer.Option(help="off, bf16 or fp16.")]
CheckpointingOption = Annotated[bool, typer.Option(help="Run blocks again in backward.")]
AccumulateOption = Annotated[int, typer.Option(help="Micro-batches of a step.")]
BucketsOption = Annotated[
    str, typer.Option(help="Bucket sizes in MiB, separated by commas; inf: one for all.")
]
ThreadsOption = Annotated[int, typer.Option(help="Threads of a rank.")]
NetworkOption = Annotated[str | None, typer.Option(help="Of the profile: on which network.")]
