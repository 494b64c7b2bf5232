"""A worker's bandwidth and CPU cores."""

from __future__ import annotations

import os
import socket

from paceline._core.network_interfaces import list_interfaces
from paceline.errors import UsageError
from paceline.transport.token_bucket import parse_share

__all__ = [
    "bandwidth_limit",
    "link_rate",
    "reserved_cores",
]


def bandwidth_limit(bandwidth: str | float | None, link: float | None) -> float | None:
    """Return bytes per second on the wire; None: no limit.

    Args:
        bandwidth: ``"40MB/s"``, ``"30%"``, ``"30% of 200Mbit/s"``, bytes per second, or None.
        link: rate of the link in bytes per second; None: unknown.

    Raises:
        UsageError: invalid, more than the link's rate, or a percentage of an unknown rate.
    """
    if bandwidth is None:
        return None
    return parse_share(bandwidth if isinstance(bandwidth, str) else f"{bandwidth}B/s", link)


def link_rate(host: str, port: int) -> float | None:
    """Return the rate of the link to a host according to the kernel; None if unknown."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port or 9))  # chooses a route; nothing is sent
        except OSError:
            return None
        own = probe.getsockname()[0]
    rates = (each.bytes_per_second for each in list_interfaces() if own in each.addresses)
    return next(rates, 0.0) or None


def reserved_cores(cores: int) -> set[int]:
    """Return the last `cores` of the cores that this process may use.

    Raises:
        UsageError: none would be left for training.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    if type(cores) is not int or not 0 <= cores < len(usable):
        raise UsageError(
            f"cores={cores!r} of {len(usable)}",
            remedy="leave at least one core to training: give 0 or fewer than there are",
        )
    return set(usable[len(usable) - cores :])
