"""Whether ``paceline train`` can resume a run: same model, data and strategy as its newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.tools.models.corpus import Corpus
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.train_settings import TrainSettings

__all__ = ["check_facts", "check_resumable", "checkpoint_facts", "original_settings"]


_SAME_OPTIONS = "resume with the options that the run began with, or start anew with --overwrite"


def checkpoint_facts(settings: TrainSettings, size: GptSize, corpus: Corpus, windows: int) -> dict[str, Any]:
    """Return what the checkpoints of a training hold besides its state; `windows` is the global batch."""
    return {
        "model": asdict(size),
        "data": corpus.fingerprint,
        "windows": windows,
        "first_val_loss": None,
        "settings": asdict(settings),
    }


def check_resumable(settings: TrainSettings, size: GptSize, corpus: Corpus, *, again: bool = False) -> None:
    """Check that a training that resumes can do so, by the manifest of its newest checkpoint.

    Args:
        settings: of the training.
        size: of the model.
        corpus: its data.
        again: it may have done its last step: a job that was requeued while it ended ends once more.

    Raises:
        UsageError: there is no checkpoint, it does not fit the training, or no step is left to do.
    """
    if settings.existing != "resume":
        return
    folder = RunFolder(settings.out)
    folder.require_checkpoint()
    path, manifest = _newest(folder.checkpoint)
    check_facts(path, manifest.facts, settings, size, corpus)
    if manifest.step >= settings.steps and not again:
        raise UsageError(
            f"nothing left to do: the checkpoint is at step {manifest.step} of {settings.steps}",
            remedy="raise --steps, or start anew with --overwrite",
        )


def original_settings(settings: TrainSettings) -> dict[str, Any] | None:
    """Return the settings that the run to be resumed began with, by its newest checkpoint; None: no such run."""
    checkpoints = RunFolder(settings.out).checkpoint
    if settings.existing != "resume" or not LocalFolder(checkpoints).names():
        return None
    saved = _newest(checkpoints)[1].facts.get("settings")
    return saved if isinstance(saved, dict) else None


def _newest(folder: Path) -> tuple[Path, Manifest]:
    """Return the newest checkpoint whose manifest is intact."""
    store = LocalFolder(folder)
    for name in store.names():
        try:
            return folder / name, Manifest.read(store.files(name).read)
        except DamagedCheckpoint:  # skipped, and reported, when checkpoints are loaded
            continue
    raise UsageError(f"no intact checkpoint in {str(folder)!r}", remedy="start anew with --overwrite")


def check_facts(
    path: Path | str, facts: Mapping[str, Any], settings: TrainSettings, size: GptSize, corpus: Corpus
) -> None:
    """Check that the checkpoint at `path` is of the same model, data and kind of synchronisation.

    Raises:
        UsageError: something differs; names it.
    """
    saved = facts.get("model")
    if not isinstance(saved, dict) or "data" not in facts:
        raise UsageError(
            f"{str(path)!r} was not written by `paceline train`", remedy="name another folder with --out"
        )
    for name, value in asdict(size).items():
        if saved.get(name) != value:
            raise UsageError(
                f"the checkpoint is of a model with {name}={saved.get(name)!r}, but the settings give {value!r}",
                remedy=_SAME_OPTIONS,
            )
    if facts["data"] != corpus.fingerprint:
        raise UsageError(
            "the checkpoint was trained on other data",
            remedy="resume with the --data that the run began with, or start anew with --overwrite",
        )
    if not settings.is_auto:
        saved_settings = facts.get("settings")
        _check_local_sgd(settings, saved_settings if isinstance(saved_settings, dict) else {})


def _check_local_sgd(settings: TrainSettings, saved: Mapping[str, Any]) -> None:
    saved_every = saved.get("every")
    if (saved_every is None) != (settings.every is None):
        before = "gradients synchronised every step" if saved_every is None else f"every={saved_every}"
        now = "no --every" if settings.every is None else f"every={settings.every}"
        raise UsageError(
            f"the checkpoint is of a run with {before}, but the settings have {now}", remedy=_SAME_OPTIONS
        )
    for name, default in (("outer", "average"), ("fragments", 1)) if saved_every is not None else ():
        before, now = saved.get(name) or default, getattr(settings, name) or default
        if before != now:
            raise UsageError(
                f"the checkpoint is of a run with {name}={before!r}, but the settings have {now!r}",
                remedy=_SAME_OPTIONS,
            )
