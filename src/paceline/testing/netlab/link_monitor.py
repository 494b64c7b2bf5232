"""What passes over a lab's links while something runs: totals and the busiest second of each host."""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.testing.netlab.lab import Lab
from paceline.testing.netlab.lab_network import InterfaceBytes, host_name

__all__ = ["HostTotals", "LinkMonitor"]

_SPAN_SECONDS = 1.0  # a token bucket and a timer that is late blur whatever is shorter


@dataclass(frozen=True)
class HostTotals:
    """What one host sent and received.

    Attributes:
        host, name, address: which one.
        rate: of its link, in bytes per second; None: unlimited.
        sent, received: bytes.
        busiest: bytes per second in its busiest second, in the busier direction.
    """

    host: int
    name: str
    address: str
    rate: float | None
    sent: int
    received: int
    busiest: float


class LinkMonitor:
    """Counts from now until `stop`; meanwhile `update` has to be called often.

    Attributes:
        seconds: how long it was watched, up to the latest count.
        now: bytes per second that all hosts together sent lately.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.seconds, self.current_rate = 0.0, 0.0
        self._started = time.monotonic()
        self._first = self._latest = self._count()
        self._busiest = [0.0] * lab.hosts

    def update(self) -> bool:
        """Count if a second has passed since the latest count, and return whether it has."""
        due = time.monotonic() - self._started - self.seconds >= _SPAN_SECONDS
        if due:
            self._note()
        return due

    def stop(self) -> list[HostTotals]:
        """Count a last time, and return what every host sent and received."""
        self._note()
        return self.totals()

    def totals(self) -> list[HostTotals]:
        """Return what every host sent and received up to the latest count."""
        made = []
        for host, (latest, first) in enumerate(zip(self._latest, self._first, strict=True)):
            passed, rate = latest - first, self._lab.rates[host]
            name, address = host_name(host), self._lab.addresses[host]
            made.append(
                HostTotals(host, name, address, rate, passed.sent, passed.received, self._busiest[host])
            )
        return made

    def _note(self) -> None:
        """Count; what passed within less than a second is only taken for a rate if there is nothing else."""
        seconds, counts = time.monotonic() - self._started, self._count()
        span = seconds - self.seconds
        passed = [new - old for new, old in zip(counts, self._latest, strict=True)]
        if span >= _SPAN_SECONDS or not self.seconds:
            self._busiest = [
                max(most, one.sent / span, one.received / span)
                for most, one in zip(self._busiest, passed, strict=True)
            ]
            self.current_rate = sum(one.sent for one in passed) / span
        self._latest, self.seconds = counts, seconds

    def _count(self) -> list[InterfaceBytes]:
        return [self._lab.bytes(host) for host in range(self._lab.hosts)]
