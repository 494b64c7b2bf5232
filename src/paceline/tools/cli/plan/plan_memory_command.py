"""``paceline plan memory``: what a training step takes on each device, and whether it fits.

Options of ``paceline plan memory``.

``paceline plan memory --verify``: the same steps run here, what they took beside what was predicted.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._core.format import format_bytes
from paceline.errors import UsageError
from paceline.tools.cli.device_memory import CUDA_CONTEXT, KINDS, capacity_of, room_of
from paceline.tools.cli.shared_options import (
    AccumulateOption,
    AutocastOption,
    CheckpointingOption,
    JsonOption,
    OptimizerOption,
    numbers_of,
)
from paceline.tools.console_table import print_wide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tools.plan.memory.memory_fit import MemoryAlternative
    from paceline.tools.plan.memory.memory_forecast import DeviceMemory, MemoryForecast
    from paceline.tools.plan.memory.training_subject import TrainingSetting, TrainingSubject

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
    "memory",
    "verified",
]


def memory(
    model: ModelOption = "small",
    inputs: InputsOption = None,
    batch: BatchOption = 1,
    context: ContextOption = 128,
    devices: DevicesOption = "1",
    strategy: StrategyOption = "bucketed",
    optimizer: OptimizerOption = "adamw",
    autocast: AutocastOption = "off",
    gather: GatherOption = "off",
    checkpointing: CheckpointingOption = False,
    accumulate: AccumulateOption = 1,
    bucket_mib: BucketMibOption = None,
    device: DeviceOption = "cuda",
    backend: BackendOption = None,
    device_memory: DeviceMemoryOption = None,
    cuda_context: CudaContextOption = CUDA_CONTEXT,
    data: DataOption = "0",
    verify: VerifyOption = False,
    json_file: JsonOption = None,
    out: OutOption = None,
) -> None:
    """Tell what a training step takes on each device, where its peak is and why, and whether it fits.

    Nothing is computed and no GPU is needed: the real engine runs on tensors without memory.

    Example: paceline plan memory --model medium --batch 8 --context 1024 --devices 1,8 --device-memory 24GiB
    """
    from paceline.tools.cli.plan.plan_memory_output import plan_files, show

    if inputs and ":" not in model:
        raise UsageError(
            f"--inputs {inputs[0]} with --model {model}, which brings its own",
            remedy="leave it out, or name a model of yours: --model package.module:name",
        )
    capacity = capacity_of(device, device_memory)
    kind = device if device in KINDS else "cuda"
    room = room_of(kind, capacity, cuda_context, data)
    settings = _settings(
        strategy, devices, batch=batch, context=context, optimizer=optimizer, autocast=autocast, gather=gather,
        checkpointing=checkpointing, accumulate=accumulate, bucket_mib=bucket_mib, device=kind,
        backend=backend or ("nccl" if kind == "cuda" else "gloo"),
    )  # fmt: skip
    write = plan_files(json_file, out)

    from paceline.tools.plan.memory.traced_training import resolve_optimizer
    from paceline.tools.plan.memory.training_subject import resolve_subject

    subject = resolve_subject(model, tuple(inputs or ()))
    resolve_optimizer(settings[0])
    forecasts, others = _traced(subject, settings, room)
    show(model, forecasts, others)
    if model == "xxl":
        from paceline.tools.cli.plan import plan_batch_command

        plan_batch_command.show_xxl()
    checks = []
    if verify:
        pass  # moved

        checks = verified(subject, settings, tuple(inputs or ()))
    for path, writer in write.items():
        writer(path, model, forecasts, others, checks, shlex.join(["paceline", *sys.argv[1:]]))
        typer.echo(path)


def _traced(
    subject: TrainingSubject, settings: Sequence[TrainingSetting], room: DeviceMemory
) -> tuple[list[MemoryForecast], list[MemoryAlternative]]:
    """Return a forecast of each setting, and what would fit where the first one doesn't; shows what is traced."""
    from rich.console import Console

    from paceline.tools.plan.memory.memory_forecast import forecast_memory, predict_alternatives

    forecasts: list[MemoryForecast] = []
    with Console(stderr=True).status("") as status:
        for setting in settings:
            status.update(f"tracing {subject.name}, {setting.name}")
            forecasts.append(forecast_memory(subject, setting, room))
        verdict = forecasts[0].verdict
        if verdict is None or not verdict.poor:
            return forecasts, []
        status.update(f"tracing what would make {subject.name} fit")
        return forecasts, predict_alternatives(subject, settings[0], room)


def _settings(strategies: str, devices: str, **options: object) -> list[TrainingSetting]:
    """Return every strategy on every number of devices; one device trains alone."""
    from paceline.tools.plan.memory.training_subject import ALONE, TrainingSetting

    counts = numbers_of("--devices", devices, int, "1,2,4,64")
    if min(counts) < 1:
        raise UsageError(f"--devices {devices}", remedy="pass numbers of 1 or more, for example 1,2,4,64")
    found: list[TrainingSetting] = []
    for count in counts:
        for name in strategies.split(","):
            strategy = ALONE if count == 1 else name.strip()
            TrainingSetting(
                strategy=name.strip()
            )  # an unknown name is refused whatever the number of devices
            setting = TrainingSetting(strategy=strategy, ranks=count, **options)  # pyright: ignore[reportArgumentType]
            found += [] if setting in found else [setting]
    return found


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


def verified(
    subject: TrainingSubject, settings: Sequence[TrainingSetting], inputs: Sequence[str]
) -> list[dict[str, Any]]:
    """Measure each setting on this machine, print predicted beside measured, return both.

    Raises:
        UsageError: this machine has not enough memory.
        RankFailed: a rank ended with an error.
    """
    import torch
    from rich.table import Table

    from paceline.launch.process.local_ranks import run_ranks
    from paceline.tools.bench.memory_benchmark import check

    table = Table(box=None, pad_edge=False)
    table.add_column("on this machine", no_wrap=True)
    for name in ("predicted", "measured", "off by"):
        table.add_column(name, justify="right", no_wrap=True)
    found = []
    for setting in settings:
        here = setting.device == "cuda" and setting.ranks <= torch.cuda.device_count()
        local = setting if here else replace(setting, device="cpu", backend="gloo")
        checked = check(subject, local, run_ranks, inputs=inputs)
        found.append(checked.facts())
        table.add_row(
            f"{local.name}, {local.device}",
            format_bytes(checked.predicted_nbytes),
            format_bytes(checked.measured.nbytes),
            f"{100 * checked.error:+.2f} %",
        )
    print_wide(table)
    typer.echo(
        "measured: the most that torch's allocator had given out at once, on the rank that took most; on processors\n"
        "where there are not as many GPUs.\n"
    )
    return found
