"""`HubMetrics`: a hub's state as metrics that Prometheus scrapes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from paceline.integrations.loggers.logger_library import require_library
from paceline.integrations.loggers.metrics_endpoint import MetricsEndpoint

if TYPE_CHECKING:
    from paceline.async_dp.hub.hub_server import HubServer

__all__ = ["HubMetrics"]

_REFRESH_SECONDS = 1.0
_MAX_WORKERS = 256  # above it only totals: every worker is seven series


class HubMetrics:
    """Serves a hub's metrics over HTTP during its block; docs/asynchronous.md lists them.

    The hub's thread calls `refresh`; scrapes read what it gathered last, so they never wait for the hub, nor it for
    them.

    Args:
        server: runs the hub; its exchange also counts what it rejects (``rejected``).
        address: ``"HOST:PORT"``, or a port of 127.0.0.1; port 0: a free one.

    Attributes:
        url: of the metrics.

    Raises:
        UsageError: prometheus-client is not installed, or the address can't be used.
    """

    def __init__(self, server: HubServer, address: str | int) -> None:
        require_library("prometheus_client", "--prometheus")
        from prometheus_client import CollectorRegistry

        self._server, self._families = server, list[Any]()
        self._refreshed = -math.inf
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self.refresh()
        self._endpoint = MetricsEndpoint(address, registry)
        self.url = self._endpoint.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._endpoint.close()

    def collect(self) -> list[Any]:
        """Return the metrics, gathered at the latest refresh; called by the thread that serves them."""
        return self._families

    def refresh(self) -> None:
        """Gather the metrics, at most once a second."""
        now = time.monotonic()
        if now - self._refreshed >= _REFRESH_SECONDS:
            self._refreshed = now
            self._families = [*self._totals(now), self._staleness(), *self._workers()]

    def _totals(self, now: float) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        server = self._server
        hub, exchange = server.hub, server.exchange
        info = InfoMetricFamily("paceline_hub", "The run that the hub serves.")
        info.add_metric([], {"run": hub.run, "phase": hub.phase})
        yield info
        gauges = {
            "workers": (len(hub.members.alive), "Live workers."),
            "quarantined_workers": (hub.quarantined(now), "Workers whose updates are refused for some time."),
            "queued_messages": (server.queued, "Messages to workers that are not sent yet."),
            "score": (hub.loss, "Score of the global parameters, as reported last; lower is better."),
            "storage_failed": (
                bool(hub.storage_error),
                "1 while the hub can't write to disk and answers nothing.",
            ),
        }
        if math.isnan(hub.loss):
            del gauges["score"]  # none was reported
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"paceline_hub_{name}", text, value=float(value))
        counters = {
            "updates": (hub.updates, "Merged updates, since the run began."),
            "samples": (hub.counters.samples, "Samples behind the merged updates, since the run began."),
            "sent_bytes": (exchange.sent_nbytes, "Bytes sent, without network headers."),
            "received_bytes": (exchange.received_nbytes, "Bytes received, without network headers."),
        }
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"paceline_hub_{name}", text, value=float(value))
        refused = CounterMetricFamily(
            "paceline_hub_refused", "Refused updates, messages and connections.", labels=["reason"]
        )
        rejected: Any = getattr(exchange, "rejected", Counter())
        for reason, count in (hub.refused + exchange.refused + rejected).items():
            refused.add_metric([reason], float(count))
        yield refused

    def _staleness(self) -> Any:
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        histogram = self._server.hub.counters.histogram
        # A bin excludes its upper edge, `le` includes it.
        edges = [floatToGoString(math.nextafter(edge, 0)) for edge in histogram.EDGES[1:-1]]
        buckets = list(zip([*edges, "+Inf"], map(float, accumulate(histogram.counts)), strict=True))
        text = "Merged updates by staleness in rounds, since the run began."
        return HistogramMetricFamily("paceline_hub_staleness_rounds", text, buckets=buckets, sum_value=None)

    def _workers(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        members = self._server.hub.members
        if len(members.alive) > _MAX_WORKERS:
            return
        alive = [member for member in members if member.number in members.alive]
        values = {
            "steps": "Local steps.",
            "speed": "Local steps per second.",
            "updates": "Merged updates.",
            "refused": "Refused updates.",
            "staleness": "Staleness of the latest update, in rounds.",
            "score": "Score reported last; lower is better.",
            "loss": "Training loss reported last.",
        }
        for name, text in values.items():
            family = GaugeMetricFamily(f"paceline_hub_worker_{name}", text, labels=["worker", "number"])
            for member in alive:
                if (value := getattr(member, name)) is not None:
                    family.add_metric([member.name, str(member.number)], float(value))
            yield family
