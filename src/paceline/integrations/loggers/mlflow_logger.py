"""`MlflowLogger`: an MLflow tracking server, or MLflow's files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError
from paceline.integrations.loggers.logger_library import flat_facts, require_library
from paceline.profiling.run_loggers import Logger

__all__ = ["MlflowLogger"]

_RUN_TAG = "paceline.run_id"
_BATCH = 100  # most parameters in one call
_MAX_VALUE_CHARS = 500  # every server accepts so many


class MlflowLogger(Logger):
    """Logs to MLflow; a resumed run continues the run with the same ``run_id``, which is kept as a tag.

    Facts of the run become parameters when it begins, nested ones with names such as ``world.size``.

    Args:
        experiment: created if it is missing; None: ``MLFLOW_EXPERIMENT_NAME``, or ``"paceline"``.
        tracking_uri: of a server or of files; None: ``MLFLOW_TRACKING_URI``.
        name: of the run; None: MLflow chooses one.

    Raises:
        UsageError: mlflow is not installed; from `start`: MLflow can't use a local `tracking_uri`.

    Example:
        >>> logger = MlflowLogger("speed", tracking_uri="http://127.0.0.1:5000")
        >>> isinstance(logger, Logger)
        True
    """

    def __init__(
        self, experiment: str | None = None, *, tracking_uri: str | None = None, name: str | None = None
    ) -> None:
        require_library("mlflow", "MlflowLogger")
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "paceline"
        self._uri, self._name = tracking_uri, name
        self._client: Any = None
        self._run = ""

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin a run, or continue the one of this experiment with the same ``config["run_id"]``."""
        import mlflow
        from mlflow.exceptions import MlflowException

        uri = self._uri or mlflow.get_tracking_uri()
        try:
            self._client = mlflow.MlflowClient(uri)
            experiment = self._client.get_experiment_by_name(self._experiment)
        except MlflowException as error:
            if uri.startswith(("http:", "https:", "databricks")):
                raise
            raise UsageError(
                f"MLflow can't use {uri!r}: {str(error).strip().splitlines()[0]}",
                remedy="set MLFLOW_TRACKING_URI to a server, http://HOST:PORT; or to file:///PATH, with "
                "MLFLOW_ALLOW_FILE_STORE=true; SQLite needs the package mlflow instead of mlflow-skinny",
            ) from error
        found = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        self._run = self._resumed(found, str(config.get("run_id", ""))) or self._created(found, config)

    def _resumed(self, experiment: str, run_id: str) -> str:
        """Return MLflow's id of the run with this `run_id`, empty if there is none."""
        if not run_id:
            return ""
        quoted = run_id.replace("'", "")
        runs = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{quoted}'", max_results=1)
        if not runs:
            return ""
        self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return runs[0].info.run_id

    def _created(self, experiment: str, config: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        tags = {_RUN_TAG: str(config["run_id"]).replace("'", "")} if "run_id" in config else {}
        run = self._client.create_run(experiment, run_name=self._name, tags=tags).info.run_id
        facts = flat_facts(config)
        params = [Param(name, str(value)[:_MAX_VALUE_CHARS]) for name, value in facts.items()]
        for at in range(0, len(params), _BATCH):
            self._client.log_batch(run, params=params[at : at + _BATCH])
        return run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send metrics."""
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in metrics.items()])

    def finish(self, failed: bool = False) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
