"""Writes the numbers of a run's steps to ``steps.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline._core.files import write_text

__all__ = ["StepMetrics"]


class StepMetrics:
    """Writes numbers of steps to a run's folder; on rank 0 only.

    Existing lines are kept up to the first step that is written; later ones are of a run that was killed, or of another
    one.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = folder / "steps.jsonl"
        self._begun = False

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Write the numbers of a step; one that is not finite is null in ``steps.jsonl``."""
        if not self._begun:
            self._forget_from(step)
            self._begun = True
        finite = {name: None if _is_non_finite(value) else value for name, value in numbers.items()}
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")

    def _forget_from(self, step: int) -> None:
        if self._lines.exists():
            lines = self._lines.read_text(encoding="utf-8").splitlines()
            write_text(self._lines, "".join(line + "\n" for line in lines if _step_of(line) < step))


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for a line that was cut."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
