"""`PrometheusLogger`: the latest metrics of a run, for Prometheus to scrape."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from paceline.integrations.loggers.logger_library import require_library
from paceline.integrations.loggers.metrics_endpoint import MetricsEndpoint, parse_address
from paceline.profiling.run_loggers import Logger

__all__ = ["PrometheusLogger"]

log = logging.getLogger("paceline.integrations")

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusLogger(Logger):
    """Serves the latest metrics over HTTP as gauges named ``paceline_loss``, ``paceline_step_seconds`` and so on.

    Rank 0 serves those of the whole run. ``paceline_run_info`` has the run's id as a label.

    Args:
        address: ``"HOST:PORT"``, or a port of 127.0.0.1; port 0: a free one, which is logged.

    Attributes:
        url: of the metrics, while a run is active.

    Raises:
        UsageError: prometheus-client is not installed, or `address` is not valid; from `start`: it is in use.

    Example:
        >>> from urllib.request import urlopen
        >>> logger = PrometheusLogger("127.0.0.1:0")
        >>> logger.start({})
        >>> logger.log({"loss": 2.5}, step=1)
        >>> [line for line in urlopen(logger.url).read().decode().splitlines() if line.startswith("paceline_loss")]
        ['paceline_loss 2.5']
        >>> logger.finish()
    """

    def __init__(self, address: str | int = "127.0.0.1:9464") -> None:
        require_library("prometheus_client", "PrometheusLogger")
        parse_address(address)
        self._address, self.url = address, ""
        self._registry: Any = None
        self._endpoint: MetricsEndpoint | None = None
        self._gauges: dict[str, Any] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin to serve."""
        from prometheus_client import CollectorRegistry, Info

        self._registry, self._gauges = CollectorRegistry(), {}
        run = Info("paceline_run", "The run that is served.", registry=self._registry)
        run.info({"run_id": str(config.get("run_id", ""))})
        self._endpoint = MetricsEndpoint(self._address, self._registry)
        self.url = self._endpoint.url
        log.info("metrics for Prometheus at %s", self.url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Replace the values that are served."""
        for name, value in {"step": step, **metrics}.items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name)
            self._gauges[name].set(value)

    def _gauge(self, name: str) -> Any:
        from prometheus_client import Gauge

        text = f"{name} of the latest logged step"
        return Gauge(f"paceline_{_NOT_IN_NAMES.sub('_', name)}", text, registry=self._registry)

    def finish(self, failed: bool = False) -> None:
        """Stop serving."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint, self.url = None, ""
