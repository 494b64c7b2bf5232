"""`WandbLogger`: Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.integrations.loggers.logger_library import require_library
from paceline.profiling.run_loggers import Logger

__all__ = ["WandbLogger"]


class WandbLogger(Logger):
    """Logs to Weights & Biases; a resumed run continues under the same id.

    W&B's own settings hold: ``wandb login``, or ``WANDB_MODE=offline`` and ``wandb sync`` afterwards. The x axis of the
    charts is the metric ``step``, so steps that are repeated after a restart are kept, too.

    Args:
        project: None: ``WANDB_PROJECT``, or ``"paceline"``.
        options: passed to ``wandb.init``, such as ``name``, ``entity``, ``tags``.

    Raises:
        UsageError: wandb is not installed.

    Example:
        >>> logger = WandbLogger("speed", name="baseline", tags=["two ranks"])
        >>> isinstance(logger, Logger)
        True
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        require_library("wandb", "WandbLogger")
        self._options: dict[str, Any] = {
            "project": project or os.environ.get("WANDB_PROJECT") or "paceline"
        } | options
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin or resume the run with the id ``config["run_id"]``; without one, begin a new run."""
        import wandb

        own: dict[str, Any] = {"config": dict(config)}
        if "run_id" in config:
            own |= {"id": config["run_id"], "resume": "allow"}
        if "folder" in config:
            own["dir"] = config["folder"]
        self._run = wandb.init(**own | self._options)
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send or store metrics."""
        self._run.log({"step": step, **metrics})

    def finish(self, failed: bool = False) -> None:
        """Wait until everything is sent or stored, and mark the run as finished or failed."""
        self._run.finish(exit_code=1 if failed else 0)
