"""Bytes that a host has sent and received, as the kernel counts them at its interfaces."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic", "counted"]


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


def counted(table: str) -> dict[str, Traffic]:
    """Return the counters of all interfaces, by name, from the text of /proc/net/dev.

    Source: Linux, proc_net(5): after the name, received bytes are column 1 and sent bytes column 9.
    """
    rows = (line.partition(":") for line in table.splitlines() if ":" in line)
    columns = {name.strip(): numbers.split() for name, _, numbers in rows}
    return {name: Traffic(sent=int(each[8]), received=int(each[0])) for name, each in columns.items()}
