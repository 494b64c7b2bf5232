"""State of a worker's session with a hub: requests, reports of the hub, exchanges in progress, timeouts (plain values).

A reply may take far longer than the last ones before its request is repeated, and twice that after each repetition.
Durations are measured only where nothing was repeated: else it is unknown which of two requests was answered (Karn's
algorithm: RFC 6298, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.async_dp.protocol.hub_messages import meta_count, meta_number

__all__ = ["FragmentExchange", "HubStatus", "ReplyTimeout", "SessionRequest"]

_UNKNOWN_SECONDS, _MIN_SECONDS, _MAX_DOUBLINGS = 10.0, 1.0, 4
_EARLY = 1.3  # parameters are fetched this many times the last fetch's duration before they are due


@dataclass(slots=True)
class SessionRequest:
    """A request of the training thread for a fragment whose snapshot it took.

    Attributes:
        fragment: its number.
        kind: ``"update"``: send an update, then fetch; ``"fetch"``: only fetch; ``"parameters"``: send the
            parameters themselves; ``"score"``: send a score.
        by: when the fetched parameters are needed, in seconds of the driver's clock.
        meta: of the message.
    """

    fragment: int
    kind: str
    by: float = 0.0
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class HubStatus:
    """Last report of a hub."""

    run: str = ""
    phase: str = "empty"
    workers: int = 0  # alive
    rate: float | None = None  # bytes per second that this worker may send; None: no limit
    slot: int = 0  # this worker is the slot-th of `slots`, for taking turns
    slots: int = 1
    samples: float = 0.0  # of all updates in the global parameters
    refusal: str = ""  # why this worker can't take part
    wants_params: bool = False  # this worker's parameters were requested

    def update(self, meta: Mapping[str, Any]) -> None:
        """Store the values that many messages repeat."""
        self.workers = meta_count(meta, "workers", self.workers)
        rate, samples = meta_number(meta, "rate"), meta_number(meta, "samples")
        self.rate = float(rate) if rate else None
        self.samples = self.samples if samples is None else float(samples)


@dataclass(slots=True)
class FragmentExchange:
    """An update or fetch in progress."""

    request: SessionRequest
    stage: str  # waiting for "ack", until it is time to "fetch", or for "params"
    started: float
    fetched: float = 0.0  # when the parameters were requested
    due: float = math.inf  # when to request them (again); infinity while the request has not been sent
    measurable: bool = True  # the pending message was not repeated


class ReplyTimeout:
    """Measures how long replies take, and how long to wait for one.

    Attributes:
        update_seconds: from the last update to its acknowledgement; 0: unknown.
        fetch_seconds: from the last fetch to its parameters; 0: unknown.
    """

    def __init__(self) -> None:
        self.update_seconds = self.fetch_seconds = 0.0
        self._doublings = 0

    def seconds(self) -> float:
        """Return how long to wait for a reply before the request is repeated."""
        took = self.fetch_seconds + self.update_seconds
        return (_MIN_SECONDS + 4 * took if took else _UNKNOWN_SECONDS) * 2**self._doublings

    def fetch_at(self, by: float) -> float:
        """Return when to fetch parameters that are due at `by`, so that they are in time and as new as possible."""
        return by - _EARLY * self.fetch_seconds

    def on_repeat(self) -> None:
        """Record that a request was repeated."""
        self._doublings = min(self._doublings + 1, _MAX_DOUBLINGS)

    def on_reply(self) -> None:
        """Record that a reply arrived."""
        self._doublings = 0
