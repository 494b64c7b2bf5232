"""Runs a worker's session over an exchange, turn by turn on any clock: in real time, or in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.async_dp.protocol.frame_sender import FrameSender
from paceline.async_dp.protocol.message_assembly import FRAME_NBYTES
from paceline.async_dp.worker.hub_session import HubSession
from paceline.transport.envelope import Envelope
from paceline.transport.transport_interface import HUB, Exchange

__all__ = ["SessionDriver"]


class SessionDriver:
    """Passes envelopes between an exchange and a session; used by one thread.

    Args:
        session: with the hub.
        exchange: to the hub.
        clock: returns when what the exchange has accepted by now will have been sent.
        rate: most bytes per second on the wire; None: no limit.
        frame_nbytes: most bytes per frame.
    """

    def __init__(
        self,
        session: HubSession,
        exchange: Exchange,
        clock: Callable[[], float],
        *,
        rate: float | None = None,
        frame_nbytes: int = FRAME_NBYTES,
    ) -> None:
        self._session, self._exchange, self._rate = session, exchange, rate
        self._sender = FrameSender(
            exchange,
            lambda: session.hub_status.run,
            lambda: session.session_id,
            rate=rate,
            on_sent=lambda message: session.message_sent(message, clock()),
            frame_nbytes=frame_nbytes,
        )
        self._session_id = session.session_id

    def turn(self, envelopes: Iterable[Envelope], now: float) -> float:
        """Handle what arrived, and send what may be sent.

        Args:
            envelopes: that arrived.
            now: seconds of a monotonic clock.

        Returns:
            seconds until the next turn is due if nothing arrives before, may be negative; infinity: none.
        """
        session, sender = self._session, self._sender
        for envelope in envelopes:
            session.receive(envelope, now)
        if session.connected and HUB not in self._exchange.peers():
            session.disconnected(now)
        if self._session_id != session.session_id:  # messages of the one before mean nothing to the hub
            self._session_id = session.session_id
            sender.forget(HUB)
        allowed = session.hub_status.rate
        if allowed is None or (self._rate is not None and self._rate < allowed):
            allowed = self._rate
        sender.set_rate(allowed, now)
        for postponed in session.postponed:
            sender.cancel(*postponed)
        session.postponed.clear()
        for message in session.pump(now):
            sender.enqueue(message)
        wait, due = sender.pump(now), session.next_due() - now
        return wait if wait < due else due

    def say_goodbye(self, now: float) -> None:
        """Send the last message, if the hub can be reached."""
        if self._session.connected:
            self._sender.enqueue(self._session.bye())
            self._sender.pump(now)
