"""The run folder of ``paceline train``: its files, and when it may be written.

    settings.json        the settings, for the ranks and for a resumed run
    run.json             command, settings, world, versions, model, start; at the end the result
    steps.jsonl          one line per logged step (rank 0)
    trace/rank<k>.jsonl  timeline of each rank; rank<k>.1.jsonl of a process that joined the running world as rank k
    tensorboard/         the numbers of steps.jsonl for TensorBoard, with ``--log tensorboard``; wandb/ for W&B
    checkpoint/          the latest complete checkpoints
    logs/rank<k>.log     output of the other ranks
    sample.txt           text that the trained model generated
    report.html          all of it on one page

In ``steps.jsonl`` steps are counted from 1. ``loss`` is that of the step's global batch, so before its update;
``val_loss``, if present, is the held-out loss after the update; on line 1 it is the loss before any update, unless it
was measured after step 1 too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline._core.files import write_text
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.errors import UsageError
from paceline.profiling.run_loggers import new_run_id
from paceline.tools.train.train_settings import ExistingRun, TrainSettings

__all__ = ["RunFolder"]

FILES = ("settings.json", "run.json", "steps.jsonl", "sample.txt", "report.html")
FOLDERS = ("trace", "checkpoint", "logs", "tensorboard", "wandb")


class RunFolder:
    """Paths and writers of one run folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = self.path / "settings.json"
        self.run = self.path / "run.json"
        self.steps = self.path / "steps.jsonl"
        self.checkpoint = self.path / "checkpoint"
        self.logs = self.path / "logs"
        self.sample = self.path / "sample.txt"

    def trace(self, rank: int) -> Path:
        """Return the trace file of `rank`."""
        return self.path / "trace" / f"rank{rank}.jsonl"

    def complete_checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return [self.checkpoint / name for name in LocalFolder(self.checkpoint).names()[::-1]]

    def found(self, existing: ExistingRun) -> ExistingRun:
        """Return the treatment of the run in the folder where ``"auto"`` leaves that to what is there.

        A run is resumed if it has a complete checkpoint. One that ended before its first checkpoint is replaced.

        Raises:
            UsageError: there are checkpoints, and all of them are damaged.
        """
        if existing != "auto":
            return existing
        if self.complete_checkpoints():
            return "resume"
        damaged = sorted(self.checkpoint.glob("step-*.damaged"))
        if damaged:
            raise UsageError(
                f"no intact checkpoint in {str(self.checkpoint)!r}, but damaged ones, such as {damaged[-1].name}",
                remedy="restore one from a copy, or start anew with --overwrite",
            )
        return "overwrite"

    def prepare(self, existing: ExistingRun) -> None:
        """Make the folder ready for a run; on rank 0, before anything else is written.

        Args:
            existing: ``"refuse"`` a folder that holds a run, ``"resume"`` it, or ``"overwrite"`` it: files of the
                run are removed, other files stay. ``"auto"`` is resolved by `found` before.

        Raises:
            UsageError: the folder holds a run and `existing` is ``"refuse"``, holds none to resume, or can't be
                written.
        """
        try:
            self._check(existing)
            self.path.mkdir(parents=True, exist_ok=True)
            if existing == "overwrite":
                self._clear()
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"can't write the run folder {str(self.path)!r}: {error.strerror}",
                remedy="name another folder with --out",
            ) from error

    def _check(self, existing: ExistingRun) -> None:
        holds_run = self.steps.exists() or self.checkpoint.exists()
        if existing == "refuse" and holds_run:
            raise UsageError(
                f"{str(self.path)!r} holds a run already",
                remedy=("resume it with --resume, " if self.complete_checkpoints() else "")
                + "replace it with --overwrite, or name another folder with --out",
            )
        if existing == "resume":
            self.require_checkpoint()

    def require_checkpoint(self) -> None:
        """Raise a `UsageError` unless there is a checkpoint to resume from."""
        if not self.complete_checkpoints():
            raise UsageError(
                f"nothing to resume: {str(self.path)!r} holds no complete checkpoint",
                remedy="leave --resume out to start anew; --resume auto does where there is nothing to resume",
            )

    def _clear(self) -> None:
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            if (self.path / name).exists():
                shutil.rmtree(self.path / name)

    def write_settings(self, settings: TrainSettings, command: Mapping[str, str]) -> None:
        """Write the settings, the command line and the time of its start; a new run gets an id."""
        write_text(self.settings, settings.to_json() + "\n")
        self.add_facts(**{"run_id": new_run_id(), **self.facts(), **command})

    def add_facts(self, **facts: Any) -> None:
        """Add `facts` to ``run.json``, replacing those of the same name."""
        write_text(self.run, json.dumps(self.facts() | facts, indent=2) + "\n")

    def facts(self) -> dict[str, Any]:
        """Return the content of ``run.json``."""
        return json.loads(self.run.read_text(encoding="utf-8")) if self.run.exists() else {}

    def remove_ranks_from(self, size: int) -> None:
        """Remove logs of ranks `size` and up: a resumed run may have fewer ranks; traces hold steps of other ranks."""
        for path in self.logs.glob("rank*.log"):
            number = path.stem.removeprefix("rank")
            if number.isdecimal() and int(number) >= size:
                path.unlink()
