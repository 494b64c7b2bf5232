"""Loggers by name, as ``paceline train --log`` lists them: ``tensorboard,wandb=my-project``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError, unknown
from paceline.integrations.loggers.mlflow_logger import MlflowLogger
from paceline.integrations.loggers.prometheus_logger import PrometheusLogger
from paceline.integrations.loggers.tensorboard_logger import TensorBoardLogger
from paceline.integrations.loggers.wandb_logger import WandbLogger
from paceline.profiling.run_loggers import Logger

__all__ = ["LOGGER_NAMES", "check_logger_names", "make_loggers"]

_LOGGERS: dict[str, Callable[..., Any]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "prometheus": PrometheusLogger,
}
LOGGER_NAMES = tuple(_LOGGERS)


def check_logger_names(names: str) -> None:
    """Raise a UsageError if `names` is not valid, see `make_loggers`; no library is needed."""
    _parse(names)


def make_loggers(names: str) -> list[Logger]:
    """Return the loggers that a list names.

    Args:
        names: of `LOGGER_NAMES`, by commas. Each may be followed by ``=`` and its first argument: a folder for
            TensorBoard, a project for W&B, an experiment for MLflow, HOST:PORT for Prometheus.

    Raises:
        UsageError: a name is unknown or repeated, an argument is not valid, or a library is not installed.

    Example:
        >>> [type(each).__name__ for each in make_loggers("tensorboard,prometheus=127.0.0.1:9400")]
        ['TensorBoardLogger', 'PrometheusLogger']
    """
    return [
        _LOGGERS[name](argument) if argument else _LOGGERS[name]() for name, argument in _parse(names).items()
    ]


def _parse(names: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in names.split(","):
        name, _, argument = (piece.strip() for piece in part.partition("="))
        if name not in _LOGGERS:
            raise unknown("logger", name, LOGGER_NAMES)
        if name in found:
            raise UsageError(f"logger {name!r} is listed twice", remedy="list it once")
        found[name] = argument
    return found
