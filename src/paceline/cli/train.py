"""``paceline train``: the reference GPT, trained data-parallel on text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.cli.train_options import (
    BatchSizeOption,
    BucketMibOption,
    CheckpointEveryOption,
    ClipOption,
    CompressionOption,
    ContextOption,
    DataOption,
    DelayOption,
    DeviceOption,
    EvalEveryOption,
    EveryOption,
    FragmentsOption,
    LrOption,
    MaxRestartsOption,
    MinRanksOption,
    OuterLrOption,
    OuterMomentumOption,
    OuterOption,
    OutOption,
    OverwriteOption,
    RanksOption,
    ResumeOption,
    SeedOption,
    SizeOption,
    StepsOption,
    SyncOption,
    ThreadsOption,
    VocabularyOption,
    WarmupOuterOption,
)
from paceline.cli.training_options import AccumulateOption
from paceline.errors import UsageError
from paceline.train.settings import Existing, Settings
from paceline.train.start import start

__all__ = ["train"]

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
