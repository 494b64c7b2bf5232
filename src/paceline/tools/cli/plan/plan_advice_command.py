"""``paceline plan``: one page of advice. Does it fit, which batch, how to synchronise, what limits, what would help?"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.tools.cli.device_memory import capacity_of, room_of
from paceline.tools.result_files import checked_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from paceline.cost_model.profile import Profile
    from paceline.tools.plan.batch_split import BatchSplit
    from paceline.tools.plan.memory.memory_forecast import MicroBatchFit
    from paceline.tools.plan.strategy_advice import RankBatch, StepAdvice

__all__ = ["Asked", "advise"]

_KINDS = {
    "bucketed": ("naive", "flat", "overlap", "bucketed"),
    "sharded": ("sharded",),
    "full-shard": ("full-shard",),
}
"""Strategies whose memory one of them tells."""


@dataclass(frozen=True)
class Asked:
    """What ``paceline plan`` is asked, as the command line says it; see its help."""

    model: str
    devices: str = "1,2,4,8"
    batch: int | None = None
    micro: int | None = None
    context: int | None = None
    optimizer: str = "adamw"
    autocast: str = "off"
    checkpointing: bool = False
    device: str | None = None
    device_memory: str | None = None
    profile: Path | None = None
    backend: str | None = None
    network: str | None = None
    json_file: Path | None = None
    out: Path | None = None

    @property
    def numbers(self) -> list[int]:
        """The numbers of devices, ascending."""
        try:
            numbers = sorted({int(part) for part in self.devices.split(",")})
        except ValueError:
            numbers = []
        if not numbers or numbers[0] < 1:
            raise UsageError(
                f"--devices {self.devices!r}", remedy="give numbers of 1 or more, for example 1,2,4,8"
            )
        return numbers


@dataclass
class Page:
    """What is told: chapters of sentences, and the facts behind them."""

    chapters: dict[str, list[str]] = field(default_factory=dict)
    fitting: dict[str, MicroBatchFit] = field(default_factory=dict)
    split: BatchSplit | None = None
    batch: RankBatch | None = None
    steps: StepAdvice | None = None

    def tell(self, title: str, lines: Sequence[str]) -> None:
        """Add a chapter and print it."""
        self.chapters[title] = list(lines)
        typer.echo("\n".join([title, *lines, ""]))

    def facts(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        steps = self.steps
        return {
            "advice": self.chapters,
            "memory": {
                name: {"samples": each.samples, **each.forecast.facts()}
                for name, each in self.fitting.items()
            },
            "batch": None if self.split is None else asdict(self.split),
            "steps": None
            if steps is None
            else {
                "best": steps.best.strategy.label,
                "limit": steps.limit,
                "shares": steps.shares,
                "points": [
                    {**asdict(each), "way": each.strategy and each.strategy.label} for each in steps.points
                ],
                "remedies": [asdict(each) for each in steps.remedies],
            },
        }


def advise(asked: Asked) -> None:
    """Print the page, and write it where that is asked.

    Raises:
        UsageError: something makes no sense, or nothing can be answered.
    """
    numbers, capacity = asked.numbers, capacity_of(asked.device, asked.device_memory)
    if capacity is None and asked.profile is None:
        raise UsageError(
            "paceline plan has nothing to plan with",
            remedy="pass --profile FILE, as paceline bench parts writes it, or --device, or both",
        )
    for name in ("batch", "micro", "context"):
        if getattr(asked, name) is not None and getattr(asked, name) < 1:
            raise UsageError(f"--{name} {getattr(asked, name)}", remedy="give 1 or more")
    writer_of = _writers(asked)
    profile = _profile(asked, numbers[-1])
    page = Page()
    if capacity is not None:
        _fit(asked, numbers[-1], capacity, _context(asked, profile), page)
    _deal(asked, numbers[-1], profile, page)
    _time(asked, numbers, profile, page)
    for path, write in writer_of.items():
        if write(path, asked, page):
            typer.echo(path)


def _context(asked: Asked, profile: Profile | None) -> int:
    """Return the tokens of a sample: as asked, or as the profile has them of this model."""
    shapes = () if profile is None else {each.shape for each in profile.models if each.model == asked.model}
    measured = {shape for shape in shapes if shape.startswith(_OF_TOKENS)}
    if asked.context is not None or len(measured) != 1:
        return asked.context or _TOKENS
    return int(measured.pop().removeprefix(_OF_TOKENS))


_OF_TOKENS, _TOKENS = "context ", 128  # how a profile says the shape of a sample, and how many are usual


def _profile(asked: Asked, most: int) -> Profile | None:
    """Return the profile; one that knows nothing of what is asked for is refused."""
    if asked.profile is None:
        return None
    from paceline.cost_model.profile import Profile
    from paceline.tools.plan.strategy_advice import pick_nearest_costs

    profile = Profile.load(asked.profile)
    if most > 1:
        pick_nearest_costs(profile, most, asked.micro or 1, **_place(asked))
    return profile


def _place(asked: Asked) -> dict[str, str | None]:
    """Return which of a profile's entries are meant."""
    shape = None if asked.context is None else f"{_OF_TOKENS}{asked.context}"
    return {"model": asked.model, "shape": shape, "backend": asked.backend, "network": asked.network}


_Writer = Callable[[Path, Asked, Page], bool]


def _writers(asked: Asked) -> dict[Path, _Writer]:
    """Return what writes which files, and whether it did; once it is clear that they can be written."""
    in_folder: dict[str, _Writer] = {"plan.json": _write_json, "scaling.png": _draw, "scaling.svg": _draw}
    return checked_files(asked.json_file, _write_json, asked.out, in_folder)


def _write_json(path: Path, asked: Asked, page: Page) -> bool:
    command = shlex.join(["paceline", *sys.argv[1:]])
    write_json(path, {"kind": "plan", "schema": 1, "command": command, **page.facts()})
    return True


def _draw(path: Path, asked: Asked, page: Page) -> bool:
    if page.steps is None:
        return False
    from paceline.tools.report.charts.plan_charts import scaling_chart

    scaling_chart(page.steps.points, f"{asked.model}: {page.steps.best.strategy.label}").save(path)
    return True


# ---------------------------------------------------------------------- does it fit?


def _fit(asked: Asked, devices: int, capacity: int, context: int, page: Page) -> None:
    """Tell the largest micro-batch that fits, by strategy."""
    from rich.console import Console

    from paceline.tools.plan.memory.memory_forecast import largest_micro_batch
    from paceline.tools.plan.memory.training_subject import ALONE, TrainingSetting, resolve_subject

    subject = resolve_subject(asked.model)
    room = room_of("cuda", capacity)
    setting = TrainingSetting(
        ranks=devices, context=context, optimizer=asked.optimizer, autocast=asked.autocast,
        checkpointing=asked.checkpointing, device="cuda", backend="nccl",
    )  # fmt: skip
    wanted = asked.micro or (-(-asked.batch // devices) if asked.batch else _MOST)
    lines = []
    for kind in _KINDS:
        strategy = kind if devices > 1 else ALONE
        with Console(stderr=True).status(f"tracing {asked.model}, {strategy}, {devices} devices"):
            fitting = largest_micro_batch(subject, replace(setting, strategy=strategy), room, wanted)
        page.fitting[kind] = fitting
        lines.append(_told(strategy, fitting, wanted))
        if devices == 1:
            break
    if not any(each.samples for each in page.fitting.values()):
        lines.append(
            f"paceline plan memory --model {asked.model} --devices {devices} tells what would make it fit."
        )
    page.tell("Does it fit?", lines)


_MOST = 4096


def _told(strategy: str, fitting: MicroBatchFit, wanted: int) -> str:
    verdict = fitting.forecast.verdict
    assert verdict is not None, "there is a capacity"
    if not fitting.samples:
        return f"{strategy}: not even one sample: {verdict.sentence}"
    up_to = "all of" if fitting.samples == wanted else "up to"
    return f"{strategy}: micro-batches of {up_to} {fitting.samples} {_samples(fitting.samples)}; {verdict.sentence}"


def _samples(count: int) -> str:
    return "sample" if count == 1 else "samples"


# ---------------------------------------------------------------------- which batch?


def _deal(asked: Asked, devices: int, profile: Profile | None, page: Page) -> None:
    """Tell micro-batch and accumulation: as asked, as fits, or as measured."""
    from paceline.tools.plan.batch_plan import describe_split
    from paceline.tools.plan.batch_split import split_batch
    from paceline.tools.plan.strategy_advice import RankBatch

    fits = max((each.samples for each in page.fitting.values()), default=None)
    if fits == 0:
        return
    if asked.batch is None:
        wanted = asked.micro or _measured_batch(asked, profile) or _MOST
        micro = wanted if fits is None else min(wanted, fits)
        page.batch = RankBatch(micro)
        told = f"Micro-batches of {micro} {_samples(micro)} without accumulation: {micro * devices} in a step"
        page.tell(
            "Which batch?",
            [
                f"{told} of {devices} device{'s' * (devices > 1)}. --batch SAMPLES tells how any other is dealt."
            ],
        )
        return
    most = min(asked.micro or asked.batch, fits or asked.batch)
    page.split = split_batch(asked.batch, devices, most)
    page.batch = RankBatch(page.split.micro, page.split.accumulation)
    page.tell("Which batch?", describe_split(page.split))


def _measured_batch(asked: Asked, profile: Profile | None) -> int | None:
    models = () if profile is None else profile.models
    return next((each.batch for each in models if each.model == asked.model), None)


# ---------------------------------------------------------------------- how long does it take?


def _time(asked: Asked, numbers: list[int], profile: Profile | None, page: Page) -> None:
    """Tell how to synchronise, what a step takes, what limits it and what would help."""
    from paceline.tools.console_table import print_wide
    from paceline.tools.plan.strategy_advice import advise_step
    from paceline.tools.plan.strategy_advice_text import advice_sentences

    if page.batch is None:
        return
    title = "How to synchronise, and what it costs"
    if profile is None:
        page.tell(
            title,
            [
                "Not known without measurements. On the machines that shall train, run paceline bench parts "
                f"--size {asked.model} --profile profile.json, and pass that file here with --profile."
            ],
        )
        return
    if numbers[-1] < 2:
        page.tell(title, ["One device sends nothing."])
        return
    micro = page.batch.micro
    fitting = [kind for kind, each in page.fitting.items() if each.samples >= micro]
    kinds = fitting if page.fitting else list(_KINDS)
    kinds = [
        kind for kind in kinds if kind != "full-shard"
    ] or kinds  # it gathers parameters: where nothing else fits
    page.steps = advise_step(
        profile,
        numbers,
        page.batch,
        [name for kind in kinds for name in _KINDS[kind]],
        **_place(asked),
    )
    page.tell(title, advice_sentences(page.steps, page.batch))
    print_wide(_table(page.steps))


def _table(steps: StepAdvice) -> Table:
    from rich.table import Table

    from paceline.tools.plan.strategy_advice_text import scaling_rows

    table = Table(box=None, pad_edge=False)
    for name in ("ranks", "how", "a step", "range", "samples/s", "efficiency", "range"):
        table.add_column(name, justify="left" if name == "how" else "right", no_wrap=True)
    for row in scaling_rows(steps):
        table.add_row(*row)
    return table
