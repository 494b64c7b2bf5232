"""The numbers of a run's steps: a line each in ``steps.jsonl``, and scalars for TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline._core.files import write_text

__all__ = ["StepMetrics"]


class StepMetrics:
    """Writes numbers of steps into a run's folder; on rank 0 alone.

    Lines that are there already stay, but for those of the first step that is written and of later ones: a run that was
    killed, or another one, had come further.

    Args:
        folder: of the run.
        tensorboard: write ``tensorboard/`` too; None: where TensorBoard is installed.
    """

    def __init__(self, folder: Path, tensorboard: bool | None = None) -> None:
        self._lines = folder / "steps.jsonl"
        self._folder = folder / "tensorboard"
        self._wanted = find_spec("tensorboard") is not None if tensorboard is None else tensorboard
        self._writer: Any = None
        self._begun = False

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Write the numbers of a step; one that is not finite is null in ``steps.jsonl``, which is JSON."""
        if not self._begun:
            self._forget_from(step)
            self._begun = True
        line = {"step": step, **{name: _finite(value) for name, value in numbers.items()}}
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._wanted:
            self._show(step, numbers)

    def _forget_from(self, step: int) -> None:
        if self._lines.exists():
            lines = self._lines.read_text(encoding="utf-8").splitlines()
            write_text(self._lines, "".join(line + "\n" for line in lines if _step_of(line) < step))

    def _show(self, step: int, numbers: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Bring everything to the disk."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    """Return the number of the step that `line` tells of; infinity for a line that was cut."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
