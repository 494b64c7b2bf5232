"""Number of cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_quota", "usable_cores"]


def usable_cores() -> float:
    """Return the hardware threads that this process may use at once, by its affinity and its container's quota."""
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(affine), cpu_quota() or float("inf"))


def cpu_quota(root: str = "/sys/fs/cgroup") -> float | None:
    """Return the cores that a container may use at once, None without a limit.

    Source: Linux, cgroup-v2.rst, ``cpu.max``: "$QUOTA $PERIOD" in microseconds.
    """
    try:
        fields = Path(f"{root}/cpu.max").read_text().split()
    except OSError:
        return None
    if len(fields) != 2 or not fields[0].isdecimal():
        return None
    return int(fields[0]) / int(fields[1])
