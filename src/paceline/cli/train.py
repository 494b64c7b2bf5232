"""``paceline train``: the reference GPT, trained data-parallel on text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import UsageError
from paceline.lm.sizes import SIZES
from paceline.sync.compress import COMPRESSIONS
from paceline.sync.plan import STRATEGIES
from paceline.train.apart import OUTERS
from paceline.train.settings import Existing, Settings
from paceline.train.start import start

__all__ = ["train"]

DEFAULT = Settings(out="runs/train")


def train(
    ranks: Annotated[int | None, typer.Option(help="Processes; 2, or as many as torchrun started.")] = None,
    min_ranks: Annotated[
        int | None, typer.Option(help="Go on with so many after failures; else with all only.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="Failures after which it goes on from the last checkpoint.")
    ] = DEFAULT.max_restarts,
    size: Annotated[str, typer.Option(help=f"Model: {', '.join(SIZES)}.")] = DEFAULT.size,
    data: Annotated[
        Path | None,
        typer.Option(help="Text file, folder, or nanoGPT .bin; else the Python standard library's sources."),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Tokens of the model; else what the data need.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a window; else the model's own.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows of a rank's micro-batch.")] = DEFAULT.batch_size,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a step.")] = DEFAULT.accumulate,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = DEFAULT.steps,
    lr: Annotated[float, typer.Option(help="Largest learning rate.")] = DEFAULT.lr,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient; 0: any.")] = DEFAULT.clip,
    sync: Annotated[
        str | None,
        typer.Option(
            help=f"Strategy: {', '.join(STRATEGIES)}, or auto: what fits the measured network, tuned while it trains. "
            "Else sharded; with --every or --compression bucketed."
        ),
    ] = None,
    bucket_mib: Annotated[float | None, typer.Option(help="Bucket size in MiB; else the strategy's.")] = None,
    compression: Annotated[
        str | None, typer.Option(help=f"Of what is sent: {', '.join(COMPRESSIONS)}, none.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(metavar="H", help="Synchronise parameters every H steps; else gradients every step."),
    ] = None,
    outer: Annotated[
        str | None,
        typer.Option(help=f"Of --every, what becomes of the mean: {', '.join(OUTERS)}; else average."),
    ] = None,
    outer_lr: Annotated[float | None, typer.Option(help="Of --outer diloco (0.7) and slowmo (1).")] = None,
    outer_momentum: Annotated[float | None, typer.Option(help="Of diloco (0.9) and slowmo (0.5).")] = None,
    fragments: Annotated[
        int | None, typer.Option(help="Of --every: parts of the model that are sent in turn; else 1.")
    ] = None,
    delay: Annotated[
        int | None, typer.Option(help="Of --every: steps from sending a part to merging it; else 0.")
    ] = None,
    warmup_outer: Annotated[
        int | None, typer.Option(help="Of --outer: steps before its momentum starts; else 0.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides initial weights and order of data.")] = DEFAULT.seed,
    eval_every: Annotated[
        int, typer.Option(help="Steps between held-out losses; 0: first and last.")
    ] = DEFAULT.eval_every,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0: last.")
    ] = DEFAULT.checkpoint_every,
    threads: Annotated[
        int | None, typer.Option(help="Threads of a rank; else its share of the cores.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else a GPU where there is one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for log, checkpoint and report.")] = Path(DEFAULT.out),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
) -> None:
    """Train a GPT on text with several processes: live progress, checkpoints, a report at the end."""
    settings = Settings(
        out=str(out),
        existing=_existing(resume, overwrite),
        ranks=ranks,
        min_ranks=min_ranks,
        max_restarts=max_restarts,
        size=size,
        data=None if data is None else str(data),
        vocabulary=vocabulary,
        context=context,
        batch_size=batch_size,
        accumulate=accumulate,
        steps=steps,
        lr=lr,
        clip=clip,
        sync=sync,
        bucket_mib=bucket_mib,
        compression=compression,
        every=every,
        outer=outer,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        fragments=fragments,
        delay=delay,
        warmup_outer=warmup_outer,
        seed=seed,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        threads=threads,
        device=device,
    )
    start(settings)


def _existing(resume: bool, overwrite: bool) -> Existing:
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", remedy="give one of them")
    if resume:
        return "resume"
    return "overwrite" if overwrite else "refuse"
