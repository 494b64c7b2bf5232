"""``paceline train``: the reference GPT, trained data-parallel on text.

Options of ``paceline train``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import UsageError
from paceline.parallel.compression.compression_config import COMPRESSIONS
from paceline.parallel.strategy import STRATEGIES
from paceline.tools.cli.shared_options import AccumulateOption
from paceline.tools.models.gpt_sizes import SIZES
from paceline.tools.train.local_sgd_settings import OUTERS
from paceline.tools.train.start_ranks import start
from paceline.tools.train.train_settings import Existing, Settings

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
    "train",
]

DEFAULT = Settings(out="runs/train")


def train(
    ranks: RanksOption = None,
    min_ranks: MinRanksOption = None,
    max_restarts: MaxRestartsOption = DEFAULT.max_restarts,
    size: SizeOption = DEFAULT.size,
    data: DataOption = None,
    vocabulary: VocabularyOption = None,
    context: ContextOption = None,
    batch_size: BatchSizeOption = DEFAULT.batch_size,
    accumulate: AccumulateOption = DEFAULT.accumulate,
    steps: StepsOption = DEFAULT.steps,
    lr: LrOption = DEFAULT.lr,
    clip: ClipOption = DEFAULT.clip,
    sync: SyncOption = None,
    bucket_mib: BucketMibOption = None,
    compression: CompressionOption = None,
    every: EveryOption = None,
    outer: OuterOption = None,
    outer_lr: OuterLrOption = None,
    outer_momentum: OuterMomentumOption = None,
    fragments: FragmentsOption = None,
    delay: DelayOption = None,
    warmup_outer: WarmupOuterOption = None,
    seed: SeedOption = DEFAULT.seed,
    eval_every: EvalEveryOption = DEFAULT.eval_every,
    checkpoint_every: CheckpointEveryOption = DEFAULT.checkpoint_every,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    out: OutOption = Path(DEFAULT.out),
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Train a GPT on text with several processes: live progress, checkpoints, a report at the end."""
    start(_settings(locals()))


def _settings(options: Mapping[str, Any]) -> Settings:
    """Return the settings that options ask for; all but three are named as they are."""
    own = {name: value for name, value in options.items() if name not in ("resume", "overwrite")}
    own |= {"out": str(options["out"]), "data": None if options["data"] is None else str(options["data"])}
    return Settings(existing=_existing(options["resume"], options["overwrite"]), **own)


def _existing(resume: bool, overwrite: bool) -> Existing:
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", remedy="give one of them")
    if resume:
        return "resume"
    return "overwrite" if overwrite else "refuse"


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
