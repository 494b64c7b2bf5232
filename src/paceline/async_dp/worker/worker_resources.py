"""The share of the network that may be used: what the user says, of what the kernel says of the link.

Where a worker's hub is, and which cores of its machine are left to traffic.

How often to send, how late to take in and in how many bits, from what transfers and steps take (pure).

A worker's link should be busy for no more than a part of the time, and the centre be there when it is due:

    delay   d = ⌈(up + down) / step⌉
    every   k = ⌈(up + down) / (busy · step)⌉, and more than d

Times are measured as they are, so they hold what other workers and the reserved share do to them: when many workers
crowd the hub's link, all send more rarely. With int8 instead of int4 the update takes twice as long; it is taken where
k stays small all the same.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass

import psutil

from paceline.errors import UsageError
from paceline.transport.hub_address import parse_address
from paceline.transport.token_bucket import parse_share
from paceline.transport.zmq.curve_keys import needs_keys

__all__ = ["AutoSettings", "check_hub_address", "choose_settings", "auto_fragments", "reserved_cores", "link_rate", "bandwidth_limit"]


def bandwidth_limit(asked: str | float | None, link: float | None) -> float | None:
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


def check_hub_address(address: str, secured: bool) -> tuple[str, int]:
    """Return host and port of a hub's address.

    Raises:
        UsageError: it is no address, or on another machine and there is no key for it.
    """
    place = parse_address(address, bind=False)
    if needs_keys(address) and not secured:
        raise UsageError(
            f"the hub at {address} is on another machine, and there is no key for it",
            remedy="give key=, a file that `paceline hub keygen` made; or insecure=True if you trust all on the way",
        )
    return place.host, place.port or 0


def reserved_cores(cores: int) -> set[int]:
    """Return the cores that are kept free."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    if type(cores) is not int or not 0 <= cores < len(usable):
        raise UsageError(
            f"cores={cores!r} of {len(usable)}",
            remedy="leave at least one core to training: give 0 or fewer than there are",
        )
    return set(usable[len(usable) - cores :])


_BUSY = 0.5


_MOST_EVERY = 500


_SMALL_EVERY = 4


_FRAGMENT_NUMEL = 32_000_000


_MOST_FRAGMENTS = 8


@dataclass(frozen=True)
class AutoSettings:
    """What to do from now on: k, d, and how updates are packed."""

    every: int
    delay: int
    codec: str


def choose_settings(step_seconds: float, up_seconds: float, down_seconds: float, codec: str) -> AutoSettings:
    """Return the settings for what was measured.

    Args:
        step_seconds: of a local step. up_seconds: from sending an update to its acknowledgement.
        down_seconds: from asking for the centre to having it. codec: of the update that was measured.

    Example:
        >>> choose(0.1, up_seconds=0.15, down_seconds=0.4, codec="int4")
        Choice(every=11, delay=6, codec='int4')
        >>> choose(1.0, up_seconds=0.15, down_seconds=0.4, codec="int4")
        Choice(every=2, delay=1, codec='int8')
    """
    step = max(step_seconds, 1e-6)
    narrow = up_seconds / 2 if codec == "int8" else up_seconds
    wide = _cadence(step, 2 * narrow + down_seconds)
    if wide[0] <= _SMALL_EVERY:
        return AutoSettings(*wide, "int8")
    return AutoSettings(*_cadence(step, narrow + down_seconds), "int4")


def _cadence(step: float, seconds: float) -> tuple[int, int]:
    delay = min(_MOST_EVERY - 1, max(1, math.ceil(seconds / step)))
    every = min(_MOST_EVERY, max(delay + 1, math.ceil(seconds / (_BUSY * step))))
    return every, delay


def auto_fragments(numel: int, layers: int) -> int:
    """Return in how many fragments to send a model; it depends on the model alone, since all workers must agree.

    Example:
        >>> fragments_for(3_000_000, 6), fragments_for(200_000_000, 24)
        (1, 7)
    """
    return max(1, min(_MOST_FRAGMENTS, layers, -(-numel // _FRAGMENT_NUMEL)))
