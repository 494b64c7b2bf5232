"""``paceline train``: trains the reference GPT data-parallel on text."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from typer import Argument

from paceline.errors import UsageError
from paceline.tools.cli.shared_options import expand_options
from paceline.tools.command_options import own, shared
from paceline.tools.train.start_training import start_training
from paceline.tools.train.train_settings import RUN_PANEL, TrainSettings

__all__ = ["train"]


@expand_options
def train(
    settings: TrainSettings,
    resume: Annotated[
        bool, shared("resume", "; --resume auto: begin anew where it left no checkpoint", panel=RUN_PANEL)
    ] = False,
    auto: Annotated[
        str | None,
        Argument(metavar="auto", help="After --resume: also for the first start.", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, own(None, "Replace the run in --out.", "--overwrite", panel=RUN_PANEL)
    ] = False,
) -> None:
    """Train a GPT on text with several processes: live progress, checkpoints, a report at the end."""
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", remedy="give one of them")
    if auto is not None and not (auto == "auto" and resume):
        raise UsageError(
            f"{auto!r} is no option of paceline train",
            remedy="names of options begin with --; or give --resume auto",
        )
    existing = "auto" if auto else "resume" if resume else "overwrite" if overwrite else "refuse"
    start_training(replace(settings, existing=existing))
