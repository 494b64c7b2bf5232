"""Limit of open files of this process."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["raise_file_limit"]


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit of open files to `wanted` if the hard limit allows it; return the limit that holds.

    Example:
        >>> raise_file_limit(1) >= 1
        True
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted if soft == resource.RLIM_INFINITY else soft
    new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
