"""``paceline plan memory``: what a training step takes on each device, and whether it fits."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.device_room import CUDA_CONTEXT, KINDS, capacity_of, room_of
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.footprint.forecast import Forecast, Room
    from paceline.bench.footprint.setting import Setting
    from paceline.bench.footprint.subject import Subject
    from paceline.plan.memory.verdict import Alternative

__all__ = ["memory"]


def memory(
    model: Annotated[
        str, typer.Option(help="A size (tiny … 2.7b), xxl, or package.module:name of a Module or a function.")
    ] = "small",
    inputs: Annotated[
        list[str] | None, typer.Option(help="Shape and type of a model's argument: 8x3x224x224, 8x128:int64.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples of a device's micro-batch.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of a sample.")] = 128,
    devices: Annotated[str, typer.Option(help="How many, for example 1,2,4,64.")] = "1",
    strategy: Annotated[
        str,
        typer.Option(help="alone, naive, flat, overlap, bucketed, sharded, full-shard; several with commas."),
    ] = "bucketed",
    optimizer: Annotated[
        str, typer.Option(help="adamw, sgd, sgd-momentum, or package.module:Class.")
    ] = "adamw",
    autocast: Annotated[str, typer.Option(help="off, bf16 or fp16.")] = "off",
    gather: Annotated[str, typer.Option(help="off or bf16: the type in which full-shard gathers.")] = "off",
    checkpointing: Annotated[bool, typer.Option(help="Run blocks again in backward.")] = False,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1,
    bucket_mib: Annotated[float | None, typer.Option(help="Instead of the strategy's own.")] = None,
    device: Annotated[
        str,
        typer.Option(help="cuda or cpu: whose allocator and optimizer; or a GPU by name."),
    ] = "cuda",
    backend: Annotated[
        str | None, typer.Option(help="nccl, gloo or paceline; else what fits the device.")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Of a device: 24GiB, 80GB. Answers whether it fits.")
    ] = None,
    cuda_context: Annotated[str, typer.Option(help="Taken by driver and kernels.")] = CUDA_CONTEXT,
    data: Annotated[str, typer.Option(help="Bytes of data that stay on the device.")] = "0",
    verify: Annotated[bool, typer.Option(help="Run it here, on processors, and compare.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write ledger and chart.")] = None,
) -> None:
    """Tell what a training step takes on each device, where its peak is and why, and whether it fits.

    Nothing is computed and no GPU is needed: the real engine runs on tensors without memory.

    Example: paceline plan memory --model medium --batch 8 --context 1024 --devices 1,8 --device-memory 24GiB
    """
    from paceline.cli.plan_memory_files import plan_files
    from paceline.cli.plan_memory_show import show

    capacity = capacity_of(device, device_memory)
    kind = device if device in KINDS else "cuda"
    room = room_of(kind, capacity, cuda_context, data)
    settings = _settings(
        strategy, devices, batch=batch, context=context, optimizer=optimizer, autocast=autocast, gather=gather,
        checkpointing=checkpointing, accumulate=accumulate, bucket_mib=bucket_mib, device=kind,
        backend=backend or ("nccl" if kind == "cuda" else "gloo"),
    )  # fmt: skip
    write = plan_files(json_file, out)

    from paceline.bench.footprint.subject import subject_of
    from paceline.bench.footprint.training import optimizer_of

    subject = subject_of(model, tuple(inputs or ()))
    optimizer_of(settings[0])
    forecasts, others = _traced(subject, settings, room)
    show(model, forecasts, others)
    if model == "xxl":
        from paceline.cli import plan_xxl

        plan_xxl.show()
    checks = []
    if verify:
        from paceline.cli.plan_memory_verify import verified

        checks = verified(subject, settings, tuple(inputs or ()))
    for path, writer in write.items():
        writer(path, model, forecasts, others, checks, shlex.join(["paceline", *sys.argv[1:]]))
        typer.echo(path)


def _traced(
    subject: Subject, settings: Sequence[Setting], room: Room
) -> tuple[list[Forecast], list[Alternative]]:
    """Return a forecast of each setting, and what would fit where the first one doesn't; shows what is traced."""
    from rich.console import Console

    from paceline.bench.footprint.forecast import alternatives, forecast

    forecasts: list[Forecast] = []
    with Console(stderr=True).status("") as status:
        for setting in settings:
            status.update(f"tracing {subject.name}, {setting.name}")
            forecasts.append(forecast(subject, setting, room))
        verdict = forecasts[0].verdict
        if verdict is None or not verdict.poor:
            return forecasts, []
        status.update(f"tracing what would make {subject.name} fit")
        return forecasts, alternatives(subject, settings[0], room)


def _settings(strategies: str, devices: str, **options: object) -> list[Setting]:
    """Return every strategy on every number of devices; one device trains alone."""
    from paceline.bench.footprint.setting import ALONE, Setting

    try:
        counts = [int(part) for part in devices.split(",")]
    except ValueError as error:
        raise UsageError(f"--devices {devices!r}", remedy="give numbers, for example 1,2,4,64") from error
    found: list[Setting] = []
    for count in counts:
        for name in strategies.split(","):
            strategy = ALONE if count == 1 else name.strip()
            Setting(strategy=name.strip())  # an unknown name is refused whatever the number of devices
            setting = Setting(strategy=strategy, ranks=count, **options)  # pyright: ignore[reportArgumentType]
            found += [] if setting in found else [setting]
    return found
