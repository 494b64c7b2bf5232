"""Options of ``paceline plan memory``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BackendOption",
    "BatchOption",
    "BucketMibOption",
    "ContextOption",
    "CudaContextOption",
    "DataOption",
    "DeviceMemoryOption",
    "DeviceOption",
    "DevicesOption",
    "GatherOption",
    "InputsOption",
    "ModelOption",
    "OutOption",
    "StrategyOption",
    "VerifyOption",
]

ModelOption = Annotated[
    str, typer.Option(help="A size (tiny … 2.7b), xxl, or package.module:name of a Module or a function.")
]
InputsOption = Annotated[
    list[str] | None, typer.Option(help="Shape and type of a model's argument: 8x3x224x224, 8x128:int64.")
]
BatchOption = Annotated[int, typer.Option(help="Samples of a device's micro-batch.")]
ContextOption = Annotated[int, typer.Option(help="Tokens of a sample.")]
DevicesOption = Annotated[str, typer.Option(help="How many, for example 1,2,4,64.")]
StrategyOption = Annotated[
    str,
    typer.Option(help="alone, naive, flat, overlap, bucketed, sharded, full-shard; several with commas."),
]
GatherOption = Annotated[str, typer.Option(help="off or bf16: the type in which full-shard gathers.")]
BucketMibOption = Annotated[float | None, typer.Option(help="Instead of the strategy's own.")]
DeviceOption = Annotated[
    str,
    typer.Option(help="cuda or cpu: whose allocator and optimizer; or a GPU by name."),
]
BackendOption = Annotated[str | None, typer.Option(help="nccl, gloo or paceline; else what fits the device.")]
DeviceMemoryOption = Annotated[
    str | None, typer.Option(help="Of a device: 24GiB, 80GB. Answers whether it fits.")
]
CudaContextOption = Annotated[str, typer.Option(help="Taken by driver and kernels.")]
DataOption = Annotated[str, typer.Option(help="Bytes of data that stay on the device.")]
VerifyOption = Annotated[bool, typer.Option(help="Run it here, on processors, and compare.")]
OutOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Write ledger and chart.")]
