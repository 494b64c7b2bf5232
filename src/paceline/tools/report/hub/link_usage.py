"""What the network carried beside what is reserved, and when the hub was away (pure).

[Note: the hub away] A hub notes every few seconds what passed since its last such note. So as long as it runs these
notes cover the time without a gap, and where one begins later than the one before ended, the hub was not there: it was
started again, or its machine slept. It was away since the last record before that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.tools.report.hub.downsample import DownsampledCurve

__all__ = ["HubDowntime", "HubTraffic", "PeakRate", "ReservedRate"]

_UNSEEN_SECONDS = 0.5  # a clock of the day is set now and then
_SILENT_SECONDS = 0.05
_MOST = 500
_FULL = 0.9


@dataclass(frozen=True)
class HubDowntime:
    """The hub was not there; both in seconds of the day."""

    since: float
    until: float


@dataclass(frozen=True)
class ReservedRate:
    """What was reserved from a time on up to another, in bytes per second, each way."""

    begin: float
    end: float
    rate: float


@dataclass(frozen=True)
class PeakRate:
    """The most that passed in one note: bytes per second, and when it was noted."""

    rate: float = 0.0
    at: float = 0.0


@dataclass
class HubTraffic:
    """Follows the notes on traffic.

    Attributes:
        sent, received: bytes in all, of envelopes, as the hub counts them: out to workers, in from them.
        out, into: bytes per second over time. peak_out, peak_in: the largest of them.
        reserved: what was reserved when; empty: nothing.
        notes: how many there were. full: in how many of those with a reservation most of it was used, either way.
        reserving: notes with a reservation.
        away: when the hub was not there, the last ones; aways: how often it was not.
    """

    sent: float = 0.0
    received: float = 0.0
    sent_rates: DownsampledCurve = field(default_factory=DownsampledCurve)
    received_rates: DownsampledCurve = field(default_factory=DownsampledCurve)
    peak_sent: PeakRate = PeakRate()
    peak_received: PeakRate = PeakRate()
    reserved: deque[ReservedRate] = field(default_factory=lambda: deque(maxlen=_MOST))
    notes: int = 0
    saturated: int = 0
    with_reservation: int = 0
    downtimes: deque[HubDowntime] = field(default_factory=lambda: deque(maxlen=_MOST))
    downtime_count: int = 0
    _covered: float | None = None  # up to when notes tell of the time
    _before: float | None = None  # when the record before was noted
    _silences: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_MOST)
    )  # since that note

    def add_time(self, t: float) -> None:
        """Note that anything was noted at `t`."""
        if self._before is not None and t - self._before > _SILENT_SECONDS:
            self._silences.append((self._before, t))
        self._before = t

    def add(
        self, t: float, sent: float, received: float, seconds: float, reserved: float | None
    ) -> HubDowntime | None:
        """Take in a note on traffic; return when the hub was away before it, if it was.

        Args:
            t: when it was noted. sent, received: bytes in these `seconds`. reserved: bytes per second, None: none.
        """
        away = self._gap(t - seconds)
        self._covered = t
        self._silences.clear()
        self.sent += sent
        self.received += received
        self.notes += 1
        if seconds > 0:
            out, into = sent / seconds, received / seconds
            self.sent_rates.add(t, out)
            self.received_rates.add(t, into)
            self.peak_sent = max(self.peak_sent, PeakRate(out, t), key=lambda peak: peak.rate)
            self.peak_received = max(self.peak_received, PeakRate(into, t), key=lambda peak: peak.rate)
            if reserved is not None and reserved > 0:
                self._reserve(t - seconds, t, reserved)
                self.with_reservation += 1
                self.saturated += max(out, into) >= _FULL * reserved
        return away

    def _gap(self, begin: float) -> HubDowntime | None:
        """Return when the hub was away if this note, which tells of the time since `begin`, says so."""
        if self._covered is None or begin - self._covered <= _UNSEEN_SECONDS:
            return None
        away = HubDowntime(
            next((since for since, until in self._silences if since <= begin <= until), begin), begin
        )
        self.downtimes.append(away)
        self.downtime_count += 1
        return away

    def _reserve(self, begin: float, end: float, rate: float) -> None:
        last = self.reserved[-1] if self.reserved else None
        if last is not None and last.rate == rate:
            self.reserved[-1] = ReservedRate(last.begin, end, rate)
        else:
            self.reserved.append(ReservedRate(begin, end, rate))
