"""Bytes that a host has sent and received, as the kernel counts them at its interface."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.lab.star import INTERFACE

__all__ = ["Traffic", "read_traffic"]


@dataclass(frozen=True)
class Traffic:
    """Bytes counted at a host's end of its link, headers included; the difference of two is what went between.

    Example:
        >>> Traffic(sent=500, received=80) - Traffic(sent=200, received=50)
        Traffic(sent=300, received=30)
    """

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


def read_traffic(table: str, interface: str = INTERFACE) -> Traffic:
    """Return the counters of an interface from the text of /proc/net/dev.

    Source: Linux, proc_net(5): after the name, received bytes are column 1 and sent bytes column 9.
    """
    for line in table.splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            columns = numbers.split()
            return Traffic(sent=int(columns[8]), received=int(columns[0]))
    raise AssertionError(f"no interface {interface} in\n{table}")
