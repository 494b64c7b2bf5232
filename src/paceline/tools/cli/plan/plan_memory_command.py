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
from paceline.parallel.strategy import ALIASES
from paceline.tools.cli.plan.device_memory import KINDS, available_memory, parse_device_memory
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own, shared
from paceline.tools.console_table import make_table, print_wide
from paceline.tools.plan.memory.non_tensor_memory import CUDA_CONTEXT

if TYPE_CHECKING:
    from paceline.tools.plan.memory.memory_fit import MemoryAlternative
    from paceline.tools.plan.memory.memory_forecast import DeviceMemory, MemoryForecast
    from paceline.tools.plan.memory.training_subject import TrainingSetting, TrainingSubject

__all__ = ["memory", "verified"]

_TRAINING, _STRATEGY, _DEVICE = "Training", "Strategy", "Device"


def memory(
    model: Annotated[
        str,
        shared(
            "model",
            ": a size (tiny … 2.7b), xxl, or package.module:name of a Module or a function",
            panel=_TRAINING,
        ),
    ] = "small",
    inputs: Annotated[
        list[str] | None,
        own(
            "SHAPE",
            "Shape and type of a model argument: 8x3x224x224, 8x128:int64; may be repeated.",
            panel=_TRAINING,
        ),
    ] = None,
    micro_batch_size: Annotated[int, shared("micro-batch-size", panel=_TRAINING)] = 1,
    accumulate: Annotated[int, shared("accumulate", panel=_TRAINING)] = 1,
    context: Annotated[int, shared("context", panel=_TRAINING)] = 128,
    optimizer: Annotated[str, shared("optimizer", panel=_TRAINING)] = "adamw",
    dtype: Annotated[
        str, shared("dtype", " of parameters: fp32 (as the model was built) or bf16", panel=_TRAINING)
    ] = "fp32",
    master_weights: Annotated[
        str, own("TYPE", "Copies of bf16 parameters that are updated: off or fp32.", panel=_TRAINING)
    ] = "off",
    autocast: Annotated[str, shared("autocast", panel=_TRAINING)] = "off",
    activation_checkpointing: Annotated[bool, shared("activation-checkpointing", panel=_TRAINING)] = False,
    world_size: Annotated[
        str, shared("world-size", ", such as 1,2,4,64", several=True, panel=_STRATEGY)
    ] = "1",
    strategy: Annotated[
        str,
        shared(
            "strategy",
            ": naive, flat, overlap, bucketed, sharded, full-shard, or alone: without others",
            several=True,
            panel=_STRATEGY,
        ),
    ] = "bucketed",
    bucket_mib: Annotated[
        float | None, shared("bucket-mib", "; default the strategy's", panel=_STRATEGY)
    ] = None,
    gather: Annotated[
        str, own("TYPE", "Type in which full-shard gathers: off or bf16.", panel=_STRATEGY)
    ] = "off",
    backend: Annotated[
        str | None,
        shared("backend", ": nccl, gloo or paceline; default: nccl for cuda, gloo for cpu", panel=_STRATEGY),
    ] = None,
    device: Annotated[
        str, shared("device", ": whose allocator and optimizer defaults", panel=_DEVICE)
    ] = "cuda",
    hardware: Annotated[str | None, shared("hardware", ", to check whether it fits", panel=_DEVICE)] = None,
    device_memory: Annotated[
        str | None, shared("device-memory", ", to check whether it fits", panel=_DEVICE)
    ] = None,
    cuda_context: Annotated[str, own("SIZE", "Memory of driver and kernels.", panel=_DEVICE)] = CUDA_CONTEXT,
    data_memory: Annotated[str, own("SIZE", "Memory of data that stay on the device.", panel=_DEVICE)] = "0",
    verify: Annotated[bool, own(None, "Run it here, on CPUs, and compare.", "--verify")] = False,
    json_file: JsonOption = None,
    out: Annotated[Path | None, shared("out", ": ledger and chart")] = None,
) -> None:
    """Predict the memory of a training step per device: its peak, the reasons for it, and whether it fits.

    Nothing is computed and no GPU is needed: the real engine runs on tensors without memory.

    Example: paceline plan memory --model medium --micro-batch-size 8 --context 1024 --world-size 1,8
    --device-memory 24GiB
    """
    from paceline.tools.cli.plan.plan_memory_output import memory_files, show_forecasts

    if inputs and ":" not in model:
        raise UsageError(
            f"--inputs {inputs[0]} with --model {model}, which has its own inputs",
            remedy="leave it out, or name your own model: --model package.module:name",
        )
    if device not in KINDS:
        raise UsageError(
            f"--device {device!r} is neither cuda nor cpu", remedy=f"a GPU by name is --hardware {device}"
        )
    capacity = parse_device_memory(hardware, device_memory)
    available = available_memory(device, capacity, cuda_context, data_memory)
    settings = _settings(
        strategy, world_size, batch=micro_batch_size, context=context, optimizer=optimizer, dtype=dtype,
        master_weights=master_weights, autocast=autocast, gather=gather, checkpointing=activation_checkpointing,
        accumulate=accumulate, bucket_mib=bucket_mib, device=device,
        backend=backend or ("nccl" if device == "cuda" else "gloo"),
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

    counts = parse_list("--world-size", devices, int, example="1,2,4,64")
    if min(counts) < 1:
        raise UsageError(f"--world-size {devices}", remedy="pass numbers of 1 or more, for example 1,2,4,64")
    given = (name.strip() for name in strategies.split(","))
    names = [ALIASES.get(name, name) for name in given]
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
