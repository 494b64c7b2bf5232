"""`TensorBoardLogger`: event files for TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.integrations.loggers.logger_library import require_library
from paceline.profiling.run_loggers import Logger

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(Logger):
    """Writes metrics as scalars, and the run's facts as text, for ``tensorboard --logdir``.

    When a run is resumed, TensorBoard hides what was written of later steps than the first that is logged again.

    Args:
        folder: for the event files; None: ``tensorboard`` in the folder of the run.

    Raises:
        UsageError: TensorBoard is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = TensorBoardLogger(folder)
        ...     logger.start({"lr": 0.1})
        ...     logger.log({"loss": 2.5}, step=1)
        ...     logger.finish()
        ...     len(os.listdir(folder))
        1
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        require_library("tensorboard", "TensorBoardLogger")
        self._folder, self._config = folder, ""
        self._path = Path()
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin a run; files are written from the first step on."""
        given = self._folder
        self._path = Path(config.get("folder", "runs"), "tensorboard") if given is None else Path(given)
        self._config = json.dumps(config, indent=2, default=str)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(self._path), purge_step=step)
            self._writer.add_text("config", f"```json\n{self._config}\n```", step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, failed: bool = False) -> None:
        """Write everything to disk."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
