"""State of a worker's session with a hub: requests, reports of the hub, exchanges in progress (plain values)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.async_dp.protocol.hub_messages import meta_count, meta_number, meta_text
from paceline.async_dp.standby.term_proof import TermProof

__all__ = ["FragmentExchange", "HelloTimer", "HubStatus", "SessionRequest"]

_HELLO_SECONDS, _MAX_HELLO_SECONDS = 1.0, 10.0
_ASK_AGAIN_SECONDS = 5.0  # a hub repeats its request with the next welcome


@dataclass(slots=True)
class HelloTimer:
    """When to say hello next: after pauses that double.

    Attributes:
        due: in seconds of the driver's clock.
    """

    due: float = -math.inf
    _pause: float = _HELLO_SECONDS

    def begin(self, now: float) -> bool:
        """Return whether it is time, and begin the next pause."""
        if now < self.due:
            return False
        self.due = now + self._pause
        self._pause = min(2 * self._pause, _MAX_HELLO_SECONDS)
        return True

    def restart(self, now: float) -> None:
        """Say hello now, and begin with short pauses."""
        self.due, self._pause = now, _HELLO_SECONDS

    def slow_down(self, now: float) -> None:
        """Begin the longest pause."""
        self.due, self._pause = now + _MAX_HELLO_SECONDS, _MAX_HELLO_SECONDS


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
    asked: int = 0  # number of the hub's last request for them
    params_sent_at: float = -math.inf  # when they were last taken or sent
    term: TermProof = field(default_factory=TermProof)  # highest that a hub has proven
    standby: str = ""  # address of the hub that takes over if this one dies
    is_other_wanted: bool = False  # this hub is a standby, or older than one that is known

    def admits(self, meta: Mapping[str, Any]) -> bool:
        """Store the term of a hub that welcomes this worker; return False if a hub with a higher one is known."""
        found = TermProof.parse(meta)
        if found.term < self.term.term:
            self.is_other_wanted = True
            return False
        self.term, self.standby = found, meta_text(meta, "standby")
        return True

    def on_ask(self, request: int, now: float) -> None:
        """Record that the worker's parameters were requested, unless those that it just sent answer this request."""
        if request != self.asked or now >= self.params_sent_at + _ASK_AGAIN_SECONDS:
            self.asked, self.wants_params = request, True

    def take_ask(self, now: float) -> None:
        """Record that the training thread answers the request."""
        self.params_sent_at = now  # first: a repetition may arrive meanwhile in the other thread
        self.wants_params = False

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
    fetch_after: float = 0.0  # seconds after its update in which the hub sends the parameters
    sent: float = 0.0  # when the last frame of the update was sent
    fetched: float = 0.0  # when the parameters were requested
    due: float = math.inf  # when to request them (again); infinity while the request has not been sent
    measurable: bool = True  # the pending message was not repeated
