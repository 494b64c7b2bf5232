"""Which checkpoint does a training go on from, and does it fit what is asked for? Read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder
from paceline.checkpoint.format.manifest import Manifest
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.tools.models.corpus import Corpus
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.train_settings import Settings

__all__ = ["begun_with", "check_facts", "facts_of", "to_resume"]


def facts_of(settings: Settings, size: GptSize, corpus: Corpus, windows: int) -> dict[str, Any]:
    """Return what a training's checkpoints remember besides its state.

    Args:
        settings, size, corpus: of the training.
        windows: of its global batch.
    """
    return {
        "model": asdict(size),
        "data": corpus.fingerprint,
        "windows": windows,
        "first_val_loss": None,
        "settings": asdict(settings),
    }


def to_resume(settings: Settings, size: GptSize, corpus: Corpus) -> int | None:
    """Return the step that a training goes on from, as its manifests tell; None: it starts anew.

    Raises:
        UsageError: there is no checkpoint, it does not fit, or it has nothing left to do.
    """
    if settings.existing != "resume":
        return None
    path, manifest = _newest(RunFolder(settings.out).checkpoint)
    check_facts(path, manifest.facts, settings, size, corpus)
    if manifest.step >= settings.steps:
        raise UsageError(
            f"nothing left to do: the checkpoint is at step {manifest.step} of {settings.steps}",
            remedy="ask for more --steps, or start anew with --overwrite",
        )
    return manifest.step


def begun_with(settings: Settings) -> dict[str, Any] | None:
    """Return the settings of the run that is resumed, as its newest checkpoint tells; None: there is none."""
    if settings.existing != "resume" or not CheckpointFolder(RunFolder(settings.out).checkpoint).complete():
        return None
    saved = _newest(RunFolder(settings.out).checkpoint)[1].facts.get("settings")
    return saved if isinstance(saved, dict) else None


def _newest(folder: Path) -> tuple[Path, Manifest]:
    """Return the newest checkpoint whose manifest is intact."""
    for path in CheckpointFolder(folder).complete():
        try:
            return path, Manifest.read(path)
        except DamagedCheckpoint:  # passed over, and told of, when it is loaded
            continue
    raise UsageError(f"no intact checkpoint in {str(folder)!r}", remedy="leave --resume out to start anew")


def check_facts(
    path: Path, facts: Mapping[str, Any], settings: Settings, size: GptSize, corpus: Corpus
) -> None:
    """Raise unless a checkpoint is of a model of `size`, trained on `corpus`, and of the same kind of loop.

    Raises:
        UsageError: naming what differs.
    """
    asked, saved = asdict(size), facts.get("model")
    if not isinstance(saved, dict) or "data" not in facts:
        raise UsageError(
            f"{str(path)!r} was not written by `paceline train`", remedy="name another folder with --out"
        )
    for name, value in asked.items():
        if saved.get(name) != value:
            raise UsageError(
                f"the checkpoint is of a model with {name}={saved.get(name)!r}, asked for is {value!r}",
                remedy="resume with the options that the run began with, or start anew with --overwrite",
            )
    if facts["data"] != corpus.fingerprint:
        raise UsageError(
            "the checkpoint was trained on other data",
            remedy="resume with the --data that the run began with, or start anew with --overwrite",
        )
    if not settings.is_auto:
        _check_apart(settings, facts.get("settings"))


def _check_apart(settings: Settings, saved: Any) -> None:
    """Raise unless the run that wrote the checkpoint trained apart as this one will, or neither does."""
    saved = saved if isinstance(saved, dict) else {}
    begun_apart = saved.get("every") is not None
    if begun_apart != (settings.every is not None):
        told = f"every={saved['every']}" if begun_apart else "gradients synchronised every step"
        asked = f"every={settings.every}" if settings.every is not None else "no --every"
        raise UsageError(
            f"the checkpoint is of a run with {told}, asked for is {asked}",
            remedy="resume with the options that the run began with, or start anew with --overwrite",
        )
    for name, usual in (("outer", "average"), ("fragments", 1)) if begun_apart else ():
        was, asked = saved.get(name) or usual, getattr(settings, name) or usual
        if was != asked:
            raise UsageError(
                f"the checkpoint is of a run with {name}={was!r}, asked for is {asked!r}",
                remedy="resume with the options that the run began with, or start anew with --overwrite",
            )
