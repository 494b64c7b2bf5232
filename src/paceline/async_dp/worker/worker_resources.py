"""A worker's hub address, bandwidth and CPU cores, and settings chosen from measured times.

A worker's link should be busy only part of the time, and the global parameters arrive when they are due:

    delay   d = ⌈(up + down) / step⌉
    every   k = ⌈(up + down) / (busy · step)⌉, and more than d

Times are used as measured, so they include the effect of other workers and of bandwidth limits: when many workers crowd
the hub's link, all send less often. With int8 instead of int4 an update takes twice as long; it is chosen where k stays
small even so.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass

from paceline._core.network_interfaces import list_interfaces
from paceline.errors import UsageError
from paceline.transport.hub_address import parse_hub_address
from paceline.transport.token_bucket import parse_share
from paceline.transport.zmq.curve_keys import needs_keys

__all__ = [
    "AutoSettings",
    "auto_fragments",
    "bandwidth_limit",
    "check_hub_address",
    "choose_settings",
    "link_rate",
    "reserved_cores",
]

_BUSY = 0.5
_MAX_EVERY = 500
_SMALL_EVERY = 4
_FRAGMENT_NUMEL, _MAX_FRAGMENTS = 32_000_000, 8


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


def check_hub_address(address: str, secured: bool) -> tuple[str, int]:
    """Return host and port of a hub's address.

    Raises:
        UsageError: invalid, or on another machine without a key.
    """
    parsed = parse_hub_address(address, bind=False)
    if needs_keys(address) and not secured:
        raise UsageError(
            f"the hub at {address} is on another machine, and there is no key for it",
            remedy="give key=, a file made by `paceline hub keygen`; or insecure=True if you trust the network",
        )
    return parsed.host, parsed.port or 0


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


@dataclass(frozen=True)
class AutoSettings:
    """k, d and the codec of updates."""

    every: int
    delay: int
    codec: str


def choose_settings(
    step_seconds: float, update_seconds: float, fetch_seconds: float, codec: str
) -> AutoSettings:
    """Return the settings for measured times.

    Args:
        step_seconds: of a local step.
        update_seconds: from sending an update to its acknowledgement.
        fetch_seconds: from requesting the global parameters to having them.
        codec: of the measured update.

    Example:
        >>> choose_settings(0.1, update_seconds=0.15, fetch_seconds=0.4, codec="int4")
        AutoSettings(every=11, delay=6, codec='int4')
        >>> choose_settings(1.0, update_seconds=0.15, fetch_seconds=0.4, codec="int4")
        AutoSettings(every=2, delay=1, codec='int8')
    """
    step = max(step_seconds, 1e-6)
    int4_seconds = update_seconds / 2 if codec == "int8" else update_seconds
    every, delay = _schedule(step, 2 * int4_seconds + fetch_seconds)
    if every <= _SMALL_EVERY:
        return AutoSettings(every, delay, "int8")
    return AutoSettings(*_schedule(step, int4_seconds + fetch_seconds), "int4")


def _schedule(step: float, seconds: float) -> tuple[int, int]:
    delay = min(_MAX_EVERY - 1, max(1, math.ceil(seconds / step)))
    every = min(_MAX_EVERY, max(delay + 1, math.ceil(seconds / (_BUSY * step))))
    return every, delay


def auto_fragments(numel: int, layers: int) -> int:
    """Return the number of fragments; it depends on the model alone, since all workers must agree.

    Example:
        >>> auto_fragments(3_000_000, 6), auto_fragments(200_000_000, 24)
        (1, 7)
    """
    return max(1, min(_MAX_FRAGMENTS, layers, -(-numel // _FRAGMENT_NUMEL)))
