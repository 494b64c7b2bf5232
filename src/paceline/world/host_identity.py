"""Which ranks run on one host."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from paceline.world.environment import launcher_node

__all__ = ["boot_id", "host_label"]


def host_label(env: Mapping[str, str], rank: int, size: int) -> str:
    """Return a text that is the same for all ranks of a host, and for no others.

    The node number that a launcher tells of this very rank comes first: so several hosts can be played on
    one machine. Without it, the host's name and its boot decide.

    Args:
        env: the environment variables. rank, size: place in the world.
    """
    node = launcher_node(env, rank, size)
    return f"node {node}" if node is not None else f"{socket.gethostname()} {boot_id()}"


def boot_id() -> str:
    """Return what tells hosts of one name apart, empty where the system has no such id."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else ""
