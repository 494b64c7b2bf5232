"""Bytes that a host of the lab has sent and received."""

from __future__ import annotations

from paceline.interfaces import Traffic, counted
from paceline.lab.star import INTERFACE

__all__ = ["Traffic", "read_traffic"]


def read_traffic(table: str, interface: str = INTERFACE) -> Traffic:
    """Return the counters of one interface from the text of /proc/net/dev."""
    found = counted(table)
    assert interface in found, f"no interface {interface} in\n{table}"
    return found[interface]
