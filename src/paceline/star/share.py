"""The share of the network that may be used: what the user says, of what the kernel says of the link."""

from __future__ import annotations

import socket

import psutil

from paceline.exchange.pace import parse_share

__all__ = ["link_rate", "share_of_link"]


def share_of_link(asked: str | float | None, link: float | None) -> float | None:
    """Return bytes per second on the wire, None for no limit.

    Args:
        asked: ``"40MB/s"``, ``"30%"``, ``"30% of 200Mbit/s"``, bytes per second, or None.
        link: what the link carries, in bytes per second, None if it is not known.

    Raises:
        UsageError: it is no share, more than there is, or one of a link whose rate is not known.
    """
    if asked is None:
        return None
    return parse_share(asked if isinstance(asked, str) else f"{asked}B/s", link)


def link_rate(host: str, port: int) -> float | None:
    """Return the rate of the link that leads to a host, as the kernel tells it; None if it tells none."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port or 9))  # chooses a way; nothing is sent
        except OSError:
            return None
        own = probe.getsockname()[0]
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses) and name in states:
            return states[name].speed * 125_000.0 or None
    return None
