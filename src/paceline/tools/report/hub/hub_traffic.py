"""Traffic of a hub compared with the reserved rate."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.tools.report.hub.downsample import DownsampledCurve

__all__ = ["HubTraffic", "PeakRate", "ReservedRate"]

_MAX_KEPT = 500
_SATURATED = 0.9


@dataclass(frozen=True)
class ReservedRate:
    """A period with a reserved rate, in bytes per second and direction."""

    begin: float
    end: float
    rate: float


@dataclass(frozen=True)
class PeakRate:
    """The highest rate of a record, in bytes per second, and its time."""

    rate: float = 0.0
    at: float = 0.0


@dataclass(kw_only=True)
class HubTraffic:
    """Accumulates traffic records.

    Attributes:
        sent: bytes of envelopes from the hub to workers.
        received: bytes of envelopes from workers.
        sent_rates: bytes per second to workers over time.
        received_rates: bytes per second from workers over time.
        peak_sent: the highest of `sent_rates`.
        peak_received: the highest of `received_rates`.
        reserved: periods with a reserved rate; empty if nothing was reserved.
        record_count: number of records.
        with_reservation: number of records with a reserved rate.
        saturated: those among them that used most of it in either direction.
    """

    sent: float = 0.0
    received: float = 0.0
    sent_rates: DownsampledCurve = field(default_factory=DownsampledCurve)
    received_rates: DownsampledCurve = field(default_factory=DownsampledCurve)
    peak_sent: PeakRate = PeakRate()
    peak_received: PeakRate = PeakRate()
    reserved: deque[ReservedRate] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT))
    record_count: int = 0
    saturated: int = 0
    with_reservation: int = 0

    def add(self, t: float, sent: float, received: float, seconds: float, reserved: float | None) -> None:
        """Add a traffic record.

        Args:
            t: time of the record.
            sent: bytes sent in the `seconds` before.
            received: bytes received in the `seconds` before.
            seconds: length of the recorded period.
            reserved: reserved bytes per second, if any.
        """
        self.sent += sent
        self.received += received
        self.record_count += 1
        if seconds > 0:
            out, into = sent / seconds, received / seconds
            self.sent_rates.add(t, out)
            self.received_rates.add(t, into)
            self.peak_sent = max(self.peak_sent, PeakRate(out, t), key=lambda peak: peak.rate)
            self.peak_received = max(self.peak_received, PeakRate(into, t), key=lambda peak: peak.rate)
            if reserved is not None and reserved > 0:
                self._extend_reserved(t - seconds, t, reserved)
                self.with_reservation += 1
                self.saturated += max(out, into) >= _SATURATED * reserved

    def _extend_reserved(self, begin: float, end: float, rate: float) -> None:
        last = self.reserved[-1] if self.reserved else None
        if last is not None and last.rate == rate:
            self.reserved[-1] = ReservedRate(last.begin, end, rate)
        else:
            self.reserved.append(ReservedRate(begin, end, rate))
