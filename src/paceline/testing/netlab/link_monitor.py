"""Monitor of a lab's links: bytes and busiest second of each host."""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.testing.netlab.lab import Lab
from paceline.testing.netlab.lab_network import InterfaceBytes, host_name

__all__ = ["HostTotals", "LinkMonitor"]

_SPAN_SECONDS = 1.0  # shorter rates are blurred by the token bucket and late timers


@dataclass(frozen=True, kw_only=True)
class HostTotals:
    """Traffic of one host.

    Attributes:
        host: its number.
        name: its host name.
        address: its IP address.
        rate: of its link, in bytes per second; None: unlimited.
        sent: bytes.
        received: bytes.
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
    """Counts bytes from construction until `stop`, in every call of `update`, which has to be called often.

    Attributes:
        seconds: from construction to the latest count.
        current_rate: bytes per second that all hosts together sent recently.
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
            self._sample()
        return due

    def stop(self) -> list[HostTotals]:
        """Count a last time, and return the totals of every host."""
        self._sample()
        return self.totals()

    def totals(self) -> list[HostTotals]:
        """Return the totals of every host up to the latest count."""
        totals = []
        for host, (latest, first) in enumerate(zip(self._latest, self._first, strict=True)):
            passed = latest - first
            totals.append(
                HostTotals(
                    host=host,
                    name=host_name(host),
                    address=self._lab.addresses[host],
                    rate=self._lab.rates[host],
                    sent=passed.sent,
                    received=passed.received,
                    busiest=self._busiest[host],
                )
            )
        return totals

    def _sample(self) -> None:
        """Count; an interval below a second only yields a rate if it is the first."""
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
