"""`MetricsEndpoint`: serves metrics over HTTP, for Prometheus to scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.integrations.loggers.logger_library import require_library

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MetricsEndpoint", "parse_address"]


def parse_address(address: str | int) -> tuple[str, int]:
    """Return host and port of an address: ``"HOST:PORT"``, or a port of this machine's loopback.

    Raises:
        UsageError: it is no address.

    Example:
        >>> parse_address("0.0.0.0:9400"), parse_address(9400)
        (('0.0.0.0', 9400), ('127.0.0.1', 9400))
    """
    host, _, port = str(address).rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"{address!r} is no address for Prometheus",
            remedy="give HOST:PORT, such as 0.0.0.0:9464, or a port of 127.0.0.1; port 0: a free one",
        )
    return host.strip("[]") or "127.0.0.1", int(port)


class MetricsEndpoint:
    """Serves a registry at ``http://HOST:PORT/metrics`` in a thread of this process, until it is closed.

    Args:
        address: see `parse_address`.
        registry: of the metrics; read by that thread whenever Prometheus scrapes.

    Attributes:
        url: with the port that was chosen for port 0.

    Raises:
        UsageError: prometheus-client is not installed, or the address can't be used.
    """

    def __init__(self, address: str | int, registry: CollectorRegistry) -> None:
        require_library("prometheus_client", "Prometheus")
        from prometheus_client import start_http_server

        host, port = parse_address(address)
        try:
            started: Any = start_http_server(port, host, registry)
        except OSError as error:
            raise UsageError(
                f"can't serve metrics at {host}:{port}: {error.strerror}",
                remedy="choose another HOST:PORT; port 0: a free one",
            ) from error
        self._server, self._thread = started
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
