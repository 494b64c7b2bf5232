"""``paceline plan memory``: what a training step takes on each device, and whether it fits."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer

from paceline.cli.device_room import CUDA_CONTEXT, KINDS, capacity_of, room_of
from paceline.cli.file_options import JsonOption
from paceline.cli.number_lists import numbers_of
from paceline.cli.plan_memory_options import (
    BackendOption,
    BatchOption,
    BucketMibOption,
    ContextOption,
    CudaContextOption,
    DataOption,
    DeviceMemoryOption,
    DeviceOption,
    DevicesOption,
    GatherOption,
    InputsOption,
    ModelOption,
    OutOption,
    StrategyOption,
    VerifyOption,
)
from paceline.cli.training_options import (
    AccumulateOption,
    AutocastOption,
    CheckpointingOption,
    OptimizerOption,
)
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.footprint.forecast import Forecast, Room
    from paceline.bench.footprint.setting import Setting
    from paceline.bench.footprint.subject import Subject
    from paceline.plan.memory.verdict import Alternative

__all__ = ["memory"]


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
    from paceline.cli.plan_memory_files import plan_files
    from paceline.cli.plan_memory_show import show

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

    counts = numbers_of("--devices", devices, int, "1,2,4,64")
    if min(counts) < 1:
        raise UsageError(f"--devices {devices}", remedy="pass numbers of 1 or more, for example 1,2,4,64")
    found: list[Setting] = []
    for count in counts:
        for name in strategies.split(","):
            strategy = ALONE if count == 1 else name.strip()
            Setting(strategy=name.strip())  # an unknown name is refused whatever the number of devices
            setting = Setting(strategy=strategy, ranks=count, **options)  # pyright: ignore[reportArgumentType]
            found += [] if setting in found else [setting]
    return found
