"""Loggers of a run's metrics: TensorBoard, W&B, MLflow and Prometheus, each with its own library.

tensorboard_logger.py  event files
wandb_logger.py        Weights & Biases, online or offline
mlflow_logger.py       a tracking server, or files
prometheus_logger.py   an HTTP endpoint that Prometheus scrapes
hub_metrics.py         the same for `paceline hub serve`
metrics_endpoint.py    the HTTP endpoint
logger_names.py        loggers by name, for ``paceline train --log``
logger_library.py      whether a library is installed; nested facts in one level
"""

from paceline.integrations.loggers.logger_names import LOGGER_NAMES, check_logger_names, make_loggers
from paceline.integrations.loggers.mlflow_logger import MlflowLogger
from paceline.integrations.loggers.prometheus_logger import PrometheusLogger
from paceline.integrations.loggers.tensorboard_logger import TensorBoardLogger
from paceline.integrations.loggers.wandb_logger import WandbLogger
from paceline.profiling.run_loggers import Logger, LoggerGroup

__all__ = [
    "LOGGER_NAMES",
    "Logger",
    "LoggerGroup",
    "MlflowLogger",
    "PrometheusLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "check_logger_names",
    "make_loggers",
]
