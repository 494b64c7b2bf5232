"""Where a worker's hub is, and which cores of its machine are left to traffic."""

from __future__ import annotations

import os

from paceline.errors import UsageError
from paceline.exchange.address import parse_address
from paceline.exchange.keys import needs_keys

__all__ = ["check_hub", "free_cores"]


def check_hub(address: str, secured: bool) -> tuple[str, int]:
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


def free_cores(cores: int) -> set[int]:
    """Return the cores that are kept free."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    if type(cores) is not int or not 0 <= cores < len(usable):
        raise UsageError(
            f"cores={cores!r} of {len(usable)}",
            remedy="leave at least one core to training: give 0 or fewer than there are",
        )
    return set(usable[len(usable) - cores :])
