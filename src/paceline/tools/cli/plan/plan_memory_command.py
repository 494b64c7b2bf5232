"""``paceline plan memory``: memory of a training step per device, and whether it fits; ``--verify`` measures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._core.format import format_bytes
from paceline._core.units import parse_list
from paceline.errors import UsageError
from paceline.tools.cli.plan.device_memory import KINDS, available_memory, parse_device_memory
from paceline.tools.cli.shared_options import (
    AccumulateOption,
    AutocastOption,
    CheckpointingOption,
    JsonOption,
    OptimizerOption,
)
from paceline.tools.console_table import make_table, print_wide
from paceline.tools.plan.memory.non_tensor_memory import CUDA_CONTEXT

if TYPE_CHECKING:
    from paceline.tools.plan.memory.memory_fit import MemoryAlternative
    from paceline.tools.plan.memory.memory_forecast import DeviceMemory, MemoryForecast
    from paceline.tools.plan.memory.training_subject import TrainingSetting, TrainingSubject

__all__ = ["memory", "verified"]


def memory(
    model: Annotated[
        str,
        typer.Option(help="A size (tiny … 2.7b), xxl, or package.module:name of a Module or a function."),
    ] = "small",
    inputs: Annotated[
        list[str] | None,
        typer.Option(help="Shape and type of a model argument: 8x3x224x224, 8x128:int64."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples of a device's micro-batch.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens per sample.")] = 128,
    devices: Annotated[str, typer.Option(help="Numbers of devices, for example 1,2,4,64.")] = "1",
    strategy: Annotated[
        str,
        typer.Option(
            help="alone, naive, flat, overlap, bucketed, sharded, full-shard; several separated by commas."
        ),
    ] = "bucketed",
    optimizer: OptimizerOption = "adamw",
    autocast: AutocastOption = "off",
    gather: Annotated[str, typer.Option(help="off or bf16: the type in which full-shard gathers.")] = "off",
    checkpointing: CheckpointingOption = False,
    accumulate: AccumulateOption = 1,
    bucket_mib: Annotated[float | None, typer.Option(help="Default: the strategy's own.")] = None,
    device: Annotated[
        str,
        typer.Option(help="cuda or cpu: whose allocator and optimizer defaults; or a GPU by name."),
    ] = "cuda",
    backend: Annotated[
        str | None, typer.Option(help="nccl, gloo or paceline; default: nccl for cuda, gloo for cpu.")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Per device: 24GiB, 80GB; to check whether it fits.")
    ] = None,
    cuda_context: Annotated[str, typer.Option(help="Memory of driver and kernels.")] = CUDA_CONTEXT,
    data: Annotated[str, typer.Option(help="Bytes of data that stay on the device.")] = "0",
    verify: Annotated[bool, typer.Option(help="Run it here, on CPUs, and compare.")] = False,
    json_file: JsonOption = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write ledger and chart.")] = None,
) -> None:
    """Predict the memory of a training step per device: its peak, the reasons for it, and whether it fits.

    Nothing is computed and no GPU is needed: the real engine runs on tensors without memory.

    Example: paceline plan memory --model medium --batch 8 --context 1024 --devices 1,8 --device-memory 24GiB
    """
    from paceline.tools.cli.plan.plan_memory_output import memory_files, show_forecasts

    if inputs and ":" not in model:
        raise UsageError(
            f"--inputs {inputs[0]} with --model {model}, which has its own inputs",
            remedy="leave it out, or name your own model: --model package.module:name",
        )
    capacity = parse_device_memory(device, device_memory)
    kind = device if device in KINDS else "cuda"
    available = available_memory(kind, capacity, cuda_context, data)
    settings = _settings(
        strategy, devices, batch=batch, context=context, optimizer=optimizer, autocast=autocast, gather=gather,
        checkpointing=checkpointing, accumulate=accumulate, bucket_mib=bucket_mib, device=kind,
        backend=backend or ("nccl" if kind == "cuda" else "gloo"),
    )  # fmt: skip
    writer_of = memory_files(json_file, out)

    from paceline.tools.plan.memory.traced_training import resolve_optimizer
    from paceline.tools.plan.memory.training_subject import resolve_subject

    subject = resolve_subject(model, tuple(inputs or ()))
    resolve_optimizer(settings[0])
    forecasts, alternatives = _trace(subject, settings, available)
    show_forecasts(model, forecasts, alternatives)
    if model == "xxl":
        from paceline.tools.cli.plan.plan_batch_command import show_xxl

        show_xxl()
    checks = verified(subject, settings, tuple(inputs or ())) if verify else []
    for path, write in writer_of.items():
        write(path, model, forecasts, alternatives, checks)
        typer.echo(path)


def _settings(strategies: str, devices: str, **options: Any) -> list[TrainingSetting]:
    """Return every strategy on every number of devices; one device trains alone."""
    from paceline.tools.plan.memory.training_subject import ALONE, TrainingSetting

    counts = parse_list("--devices", devices, int, example="1,2,4,64")
    if min(counts) < 1:
        raise UsageError(f"--devices {devices}", remedy="pass numbers of 1 or more, for example 1,2,4,64")
    names = [name.strip() for name in strategies.split(",")]
    for name in names:
        TrainingSetting(strategy=name)  # rejects unknown names for any number of devices
    pairs = ((ALONE if count == 1 else name, count) for count in counts for name in names)
    return [TrainingSetting(strategy=name, ranks=count, **options) for name, count in dict.fromkeys(pairs)]


def _trace(
    subject: TrainingSubject, settings: Sequence[TrainingSetting], available: DeviceMemory
) -> tuple[list[MemoryForecast], list[MemoryAlternative]]:
    """Return a forecast per setting, and alternatives to the first one if it does not fit; shows the progress."""
    from rich.console import Console

    from paceline.tools.plan.memory.memory_forecast import forecast_memory, predict_alternatives

    forecasts: list[MemoryForecast] = []
    with Console(stderr=True).status("") as status:
        for setting in settings:
            status.update(f"tracing {subject.name}, {setting.name}")
            forecasts.append(forecast_memory(subject, setting, available))
        verdict = forecasts[0].verdict
        if verdict is None or not verdict.poor:
            return forecasts, []
        status.update(f"tracing alternatives that would make {subject.name} fit")
        return forecasts, predict_alternatives(subject, settings[0], available)


def verified(
    subject: TrainingSubject, settings: Sequence[TrainingSetting], inputs: Sequence[str]
) -> list[dict[str, Any]]:
    """Measure each setting on this machine, print predicted and measured memory, and return both.

    Raises:
        UsageError: this machine has not enough memory.
        RankFailed: a rank ended with an error.
    """
    import torch

    from paceline.launch.process.local_ranks import run_ranks
    from paceline.tools.bench.memory_benchmark import check_prediction

    rows, found = [], []
    for setting in settings:
        here = setting.device == "cuda" and setting.ranks <= torch.cuda.device_count()
        local = setting if here else replace(setting, device="cpu", backend="gloo")
        checked = check_prediction(subject, local, run_ranks, inputs=inputs)
        found.append(checked.facts())
        sizes = map(format_bytes, (checked.predicted_nbytes, checked.measured.nbytes))
        rows.append((f"{local.name}, {local.device}", *sizes, f"{100 * checked.error:+.2f} %"))
    print_wide(make_table(("on this machine", "predicted", "measured", "off by"), rows))
    typer.echo(
        "measured: the most that torch's allocator had given out at once, on the rank with the most; on CPUs where\n"
        "there are not enough GPUs.\n"
    )
    return found
