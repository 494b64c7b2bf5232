"""Updates and fetches of a session that are in progress, and when each of their messages is repeated (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.worker.reply_timeout import ReplyTimeout
from paceline.async_dp.worker.session_state import FragmentExchange, SessionRequest

__all__ = ["FragmentExchanges"]

_SHORTEST_SECONDS = 1e-6  # 0 is unknown


class FragmentExchanges:
    """At most one exchange per fragment; times are seconds of the driver's clock.

    Attributes:
        due: when something may have to be repeated or fetched; infinity: never.
        resent: number of repeated messages.
        reply_timeout: measures replies.
    """

    def __init__(self) -> None:
        self.due, self.resent, self.reply_timeout = math.inf, 0, ReplyTimeout()
        self._exchanges: dict[int, FragmentExchange] = {}
        self._resend_at: dict[int, float] = {}  # updates by fragment; infinity while one has not been sent

    def __len__(self) -> int:
        return len(self._exchanges)

    def __iter__(self) -> Iterator[tuple[int, FragmentExchange]]:
        return iter(self._exchanges.items())

    @property
    def busy(self) -> set[int]:
        """Fragments with an exchange, or an update that is not acknowledged."""
        return self._exchanges.keys() | self._resend_at.keys()

    def begin(self, request: SessionRequest, now: float) -> FragmentExchange:
        """Begin the exchange that a request starts, and return it."""
        exchange = self._exchanges[request.fragment] = FragmentExchange(request, "ack", now)
        return exchange

    def get(self, fragment: int) -> FragmentExchange | None:
        """Return the exchange of a fragment; None if there is none."""
        return self._exchanges.get(fragment)

    def resume(self, fragment: int, exchange: FragmentExchange) -> None:
        """Continue an exchange that was ended."""
        self._exchanges[fragment] = exchange

    def end(self, fragment: int, now: float) -> None:
        """End the exchange of a fragment, whose parameters have arrived."""
        exchange = self._exchanges.pop(fragment)
        self.reply_timeout.on_reply()
        if exchange.measurable:
            self.reply_timeout.fetch_seconds = max(0.0, now - exchange.fetched)
        self.refresh()

    def measure_update(self, exchange: FragmentExchange, until: float) -> None:
        """Record that the update of an exchange took until a time, unless it was repeated."""
        if exchange.measurable:
            self.reply_timeout.update_seconds = max(_SHORTEST_SECONDS, until - exchange.started)

    # ------------------------------------------------------------------ updates

    def update_queued(self, fragment: int) -> None:
        """Record that an update waits to be sent."""
        self._resend_at[fragment] = math.inf

    def awaits_ack(self, fragment: int) -> bool:
        """Return whether an update of a fragment is not acknowledged."""
        return fragment in self._resend_at

    def acknowledged(self, fragment: int) -> None:
        """Record that an update was acknowledged, maybe one that an earlier process of this worker sent."""
        self._resend_at.pop(fragment, None)
        self.refresh()

    def postpone(self, fragment: int, until: float) -> None:
        """Repeat an update no earlier than at a time."""
        self._resend_at[fragment] = until
        self.refresh()

    # ------------------------------------------------------------------ time-outs

    def on_sent(self, message: HubMessage, now: float) -> None:
        """Record that all frames of a message were sent."""
        resend_at = now + self.reply_timeout.seconds()
        exchange = self._exchanges.get(message.fragment)
        if message.kind == "update" and message.fragment in self._resend_at:
            if exchange is not None:
                exchange.sent, exchange.fetched = now, now + exchange.fetch_after
                resend_at += exchange.fetch_after
            self._resend_at[message.fragment] = resend_at
        elif message.kind == "fetch" and exchange is not None:
            exchange.due = resend_at
        else:
            return
        self.due = min(self.due, resend_at)

    def wait(self, exchange: FragmentExchange, until: float) -> None:
        """Fetch the parameters of an exchange at a time."""
        exchange.due = until
        self.due = min(self.due, until)

    def mark_repeated(self, fragment: int) -> None:
        """Record that a message of a fragment is sent again: its duration means nothing, and its answer is fetched."""
        exchange = self._exchanges.get(fragment)
        if exchange is not None:
            exchange.measurable, exchange.fetch_after = False, 0.0

    def overdue(self, now: float) -> tuple[list[int], list[tuple[int, FragmentExchange]]]:
        """Return the fragments whose update has to be sent again, and the exchanges that have to fetch (again)."""
        resent = self.resent
        updates = [fragment for fragment, resend_at in self._resend_at.items() if now >= resend_at]
        for fragment in updates:
            self.resent += 1
            self.mark_repeated(fragment)
        fetches = [each for each in self._exchanges.items() if now >= each[1].due]
        for _, exchange in fetches:
            if exchange.stage == "params":
                self.resent += 1
                exchange.measurable = False
        if self.resent > resent:
            self.reply_timeout.on_repeat()
        return updates, fetches

    def refresh(self) -> None:
        """Make `due` the first of all times."""
        due = math.inf
        for resend_at in self._resend_at.values():
            due = resend_at if resend_at < due else due
        for exchange in self._exchanges.values():
            due = exchange.due if exchange.due < due else due
        self.due = due
