"""``paceline plan``: one page of advice: does it fit, which batch, how to synchronise, what limits, what would help."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._core.files import write_json
from paceline._core.format import plural
from paceline._core.units import parse_list
from paceline.errors import UsageError
from paceline.tools.cli.plan.device_memory import available_memory, parse_device_memory
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own, shared
from paceline.tools.result_files import checked_files

if TYPE_CHECKING:
    from paceline.cost_model.profile import Profile
    from paceline.tools.plan.memory.memory_forecast import MicroBatchFit
    from paceline.tools.plan.micro_batch_split import BatchSplit
    from paceline.tools.plan.strategy_advice import RankBatch, StepAdvice

__all__ = ["plan"]

_STRATEGIES_LIKE = {
    "bucketed": ("naive", "flat", "overlap", "bucketed"),
    "sharded": ("sharded",),
    "full-shard": ("full-shard",),
}
"""Strategies that need the same memory as the one whose memory is predicted."""

_CONTEXT_SHAPE = "context "  # prefix of a sample's shape in a profile
_DEFAULT_CONTEXT = 128
_MAX_MICRO_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class _Training:
    """The training to plan: options of ``paceline plan``."""

    model: str
    devices: tuple[int, ...]
    batch: int | None = None
    max_micro: int | None = None
    context: int | None = None
    optimizer: str = "adamw"
    autocast: str = "off"
    checkpointing: bool = False
    backend: str | None = None
    network: str | None = None

    @property
    def profile_keys(self) -> dict[str, str | None]:
        """What selects the entries of a profile."""
        shape = None if self.context is None else f"{_CONTEXT_SHAPE}{self.context}"
        return {"model": self.model, "shape": shape, "backend": self.backend, "network": self.network}


@dataclass
class _Page:
    """Chapters of sentences, and the facts behind them."""

    chapters: dict[str, list[str]] = field(default_factory=dict)
    fits: dict[str, MicroBatchFit] = field(default_factory=dict)
    split: BatchSplit | None = None
    batch: RankBatch | None = None
    steps: StepAdvice | None = None

    def add(self, title: str, *lines: str) -> None:
        """Add a chapter and print it."""
        self.chapters[title] = list(lines)
        typer.echo("\n".join([title, *lines, ""]))


def plan(
    context: typer.Context,
    model: Annotated[
        str | None, shared("model", ": a size (tiny … 2.7b), or package.module:name; as named in the profile")
    ] = None,
    world_size: Annotated[
        str, shared("world-size", "; the advice is for the largest", several=True)
    ] = "1,2,4,8",
    global_batch_size: Annotated[
        int | None, shared("global-batch-size", "; default: what fits or was measured")
    ] = None,
    max_micro_batch_size: Annotated[int | None, own("N", "Most samples of a rank's micro-batch.")] = None,
    tokens: Annotated[int | None, shared("context", "; default: as measured, or 128")] = None,
    optimizer: Annotated[str, shared("optimizer")] = "adamw",
    autocast: Annotated[str, shared("autocast")] = "off",
    activation_checkpointing: Annotated[bool, shared("activation-checkpointing")] = False,
    hardware: Annotated[str | None, shared("hardware", ", to check whether it fits")] = None,
    device_memory: Annotated[str | None, shared("device-memory", ", instead of --hardware")] = None,
    profile: Annotated[Path | None, shared("profile", " of step times, by paceline bench parts")] = None,
    backend: Annotated[str | None, shared("backend", " of the profile, if it has several")] = None,
    network: Annotated[str | None, shared("network", ", if it has several")] = None,
    json_file: JsonOption = None,
    out: Annotated[Path | None, shared("out", ": plan.json and the scaling chart")] = None,
) -> None:
    """Plan a training: does it fit, which batch, how to synchronise, how long, what limits, what would help most.

    Example: paceline plan --model small --hardware rtx-4090 --world-size 1,2,4 --global-batch-size 256
    --profile profile.json
    """
    if context.invoked_subcommand is not None:
        return
    if model is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    numbers = parse_list("--world-size", world_size, int, example="1,2,4,8")
    if min(numbers) < 1:
        raise UsageError(
            f"--world-size {world_size!r}", remedy="give numbers of 1 or more, for example 1,2,4,8"
        )
    capacity = parse_device_memory(hardware, device_memory)
    if capacity is None and profile is None:
        raise UsageError(
            "paceline plan has nothing to plan with",
            remedy="pass --profile FILE, as paceline bench parts writes it, or --hardware, or both",
        )
    for name, value in (
        ("global-batch-size", global_batch_size),
        ("max-micro-batch-size", max_micro_batch_size),
        ("context", tokens),
    ):
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}", remedy="give 1 or more")
    training = _Training(
        model=model,
        devices=tuple(sorted(set(numbers))),
        batch=global_batch_size,
        max_micro=max_micro_batch_size,
        context=tokens,
        optimizer=optimizer,
        autocast=autocast,
        checkpointing=activation_checkpointing,
        backend=backend,
        network=network,
    )
    _advise(training, capacity, profile, json_file, out)


def _advise(
    training: _Training,
    capacity: int | None,
    profile_file: Path | None,
    json_file: Path | None,
    out: Path | None,
) -> None:
    """Print the page and write the files."""
    in_folder: dict[str, _Writer] = {"plan.json": _write_json, "scaling.png": _draw, "scaling.svg": _draw}
    writer_of = checked_files(json_file, _write_json, out, in_folder)
    profile = None if profile_file is None else _load_profile(profile_file, training)
    page = _Page()
    if capacity is not None:
        _add_fit(training, capacity, _context_of(training, profile), page)
    _add_batch(training, profile, page)
    _add_steps(training, profile, page)
    for path, write in writer_of.items():
        if write(path, training, page):
            typer.echo(path)


def _load_profile(path: Path, training: _Training) -> Profile:
    """Return the profile.

    Raises:
        UsageError: it can't be read, or has no step of this training.
    """
    from paceline.cost_model.profile import Profile
    from paceline.tools.plan.strategy_advice import pick_nearest_costs

    profile = Profile.load(path)
    if training.devices[-1] > 1:
        pick_nearest_costs(profile, training.devices[-1], training.max_micro or 1, **training.profile_keys)
    return profile


def _context_of(training: _Training, profile: Profile | None) -> int:
    """Return the tokens per sample: as given, or as measured if the profile has one length for the model."""
    if training.context is not None:
        return training.context
    models = () if profile is None else profile.models
    shapes = {each.shape for each in models if each.model == training.model}
    measured = [shape for shape in shapes if shape.startswith(_CONTEXT_SHAPE)]
    return int(measured[0].removeprefix(_CONTEXT_SHAPE)) if len(measured) == 1 else _DEFAULT_CONTEXT


_Writer = Callable[[Path, _Training, _Page], bool]


def _write_json(path: Path, training: _Training, page: _Page) -> bool:
    record: dict[str, Any] = {
        "kind": "plan",
        "schema": 1,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "advice": page.chapters,
        "memory": {
            name: {"samples": each.samples, **each.forecast.facts()} for name, each in page.fits.items()
        },
        "batch": None if page.split is None else page.split.facts(),
        "steps": None if page.steps is None else _step_facts(page.steps),
    }
    write_json(path, record)
    return True


def _step_facts(steps: StepAdvice) -> dict[str, Any]:
    points = []
    for point in steps.points:
        numbers = {name: value for name, value in asdict(point).items() if name not in ("ranks", "strategy")}
        label = None if point.strategy is None else point.strategy.label
        points.append({"ranks": point.ranks, "way": label, **numbers})
    return {
        "best": steps.best.strategy.label,
        "limit": steps.limit,
        "shares": steps.shares,
        "points": points,
        "remedies": [asdict(each) for each in steps.remedies],
    }


def _draw(path: Path, training: _Training, page: _Page) -> bool:
    if page.steps is None:
        return False
    from paceline.tools.report.charts.plan_charts import scaling_chart

    title = f"{training.model}: {page.steps.best.strategy.label}"
    scaling_chart(page.steps.points, title).save(path)
    return True


def _add_fit(training: _Training, capacity: int, context: int, page: _Page) -> None:
    """Add the largest micro-batch that fits, per strategy."""
    from rich.console import Console

    from paceline.tools.plan.memory.memory_forecast import largest_micro_batch
    from paceline.tools.plan.memory.training_subject import ALONE, TrainingSetting, resolve_subject

    subject, devices = resolve_subject(training.model), training.devices[-1]
    available = available_memory("cuda", capacity)
    setting = TrainingSetting(
        ranks=devices, context=context, optimizer=training.optimizer, autocast=training.autocast,
        checkpointing=training.checkpointing, device="cuda", backend="nccl",
    )  # fmt: skip
    wanted = training.max_micro or (-(-training.batch // devices) if training.batch else _MAX_MICRO_BATCH)
    lines = []
    for kind in _STRATEGIES_LIKE if devices > 1 else ("bucketed",):
        strategy = kind if devices > 1 else ALONE
        with Console(stderr=True).status(f"tracing {training.model}, {strategy}, {devices} devices"):
            fit = largest_micro_batch(subject, replace(setting, strategy=strategy), available, wanted)
        page.fits[kind] = fit
        lines.append(f"{strategy}: {_describe_fit(fit, wanted)}")
    if not any(each.samples for each in page.fits.values()):
        lines.append(
            f"paceline plan memory --model {training.model} --world-size {devices} shows what would make it fit."
        )
    page.add("Does it fit?", *lines)


def _describe_fit(fit: MicroBatchFit, wanted: int) -> str:
    verdict = fit.forecast.verdict
    assert verdict is not None, "there is a capacity"
    if not fit.samples:
        return f"not even one sample: {verdict.sentence}"
    up_to = "all of" if fit.samples == wanted else "up to"
    return f"micro-batches of {up_to} {_samples(fit.samples)}; {verdict.sentence}"


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count != 1)}"


def _add_batch(training: _Training, profile: Profile | None, page: _Page) -> None:
    """Add micro-batch and accumulation: as given, as fits, or as measured."""
    from paceline.tools.plan.batch_plan import describe_split
    from paceline.tools.plan.micro_batch_split import split_batch
    from paceline.tools.plan.strategy_advice import RankBatch

    title, devices = "Which batch?", training.devices[-1]
    fits = max((each.samples for each in page.fits.values()), default=None)
    if fits == 0:
        return
    if training.batch is None:
        models = () if profile is None else profile.models
        measured = next((each.batch for each in models if each.model == training.model), None)
        wanted = training.max_micro or measured or _MAX_MICRO_BATCH
        micro = wanted if fits is None else min(wanted, fits)
        page.batch = RankBatch(micro)
        page.add(
            title,
            f"Micro-batches of {_samples(micro)} without accumulation: {micro * devices} per step of "
            f"{plural(devices, 'device')}. --global-batch-size N shows the split of any other.",
        )
        return
    page.split = split_batch(
        training.batch, devices, min(training.max_micro or training.batch, fits or training.batch)
    )
    page.batch = RankBatch(page.split.micro, page.split.accumulation)
    page.add(title, *describe_split(page.split))


def _add_steps(training: _Training, profile: Profile | None, page: _Page) -> None:
    """Add how to synchronise, the time of a step, what limits it and what would help."""
    from paceline.tools.console_table import make_table, print_wide
    from paceline.tools.plan.strategy_advice import advise_step
    from paceline.tools.plan.strategy_advice_text import SCALING_COLUMNS, advice_sentences, scaling_rows

    if page.batch is None:
        return
    title = "How to synchronise, and what it costs"
    if profile is None:
        page.add(
            title,
            "Unknown without measurements. On the machines that will train, run paceline bench parts "
            f"--model {training.model} --profile profile.json, and pass that file here with --profile.",
        )
        return
    if training.devices[-1] < 2:
        page.add(title, "One device sends nothing.")
        return
    kinds = list(_STRATEGIES_LIKE)
    if page.fits:
        kinds = [kind for kind, each in page.fits.items() if each.samples >= page.batch.micro]
    kinds = [
        kind for kind in kinds if kind != "full-shard"
    ] or kinds  # full-shard only where nothing else fits
    strategies = [name for kind in kinds for name in _STRATEGIES_LIKE[kind]]
    page.steps = advise_step(profile, training.devices, page.batch, strategies, **training.profile_keys)
    page.add(title, *advice_sentences(page.steps, page.batch))
    rows: Sequence[Sequence[str]] = scaling_rows(page.steps)
    print_wide(make_table(SCALING_COLUMNS, rows, left=2))
