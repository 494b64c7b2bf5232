"""The communication thread: exchanges messages with a hub while the training thread trains."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection

from paceline.async_dp.protocol.frame_sender import FrameSender
from paceline.async_dp.worker.hub_session import HubSession
from paceline.transport.zmq import WorkerExchange

__all__ = ["CommThread"]

log = logging.getLogger("paceline.async_dp")

_MAX_WAIT_SECONDS = 0.5
_REPEAT_WARNING_SECONDS = 60.0


class CommThread:
    """Runs a session over an exchange in a thread, until it is closed.

    Args:
        session: with the hub.
        exchange: carries its messages; closed with this.
        rate: most bytes per second on the wire; None: no limit.
        heartbeat: returns the training state that is reported to the hub.
        cores: that the thread is pinned to; empty: any.

    Attributes:
        error: exception that ended the thread; None if there was none.
    """

    error: BaseException | None

    def __init__(
        self,
        session: HubSession,
        exchange: WorkerExchange,
        *,
        rate: float | None,
        heartbeat: Callable[[], dict[str, object]],
        cores: Collection[int] = (),
    ) -> None:
        self.session, self.exchange, self.error = session, exchange, None
        self._rate, self._heartbeat, self._cores = rate, heartbeat, cores
        self._sender = FrameSender(
            exchange,
            lambda: session.hub_status.run,
            lambda: session.session_id,
            rate=rate,
            on_sent=lambda message: session.message_sent(message, time.monotonic()),
        )
        self._closing = threading.Event()
        self._session_id, self._warning, self._warned_at = session.session_id, "", 0.0
        self._thread = threading.Thread(
            target=self._run, name=f"paceline async {exchange.address}", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at new requests now."""
        self.exchange.wake()

    def close(self, seconds: float = 2.0) -> None:
        """Say goodbye to the hub and end the thread."""
        self._closing.set()
        self.exchange.wake()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self.exchange.close()

    def _run(self) -> None:
        if self._cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._cores)  # of this thread
        try:
            wait = 0.0
            while not self._closing.is_set():
                wait = self._turn(wait)
            if self.session.connected:
                self._sender.enqueue(self.session.bye())
                self._sender.pump(time.monotonic())
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            self.error = error

    def _turn(self, wait: float) -> float:
        """Receive for up to `wait` seconds, send what may be sent; return how long to wait next."""
        session, sender = self.session, self._sender
        envelopes = self.exchange.poll(wait)
        now = time.monotonic()
        for envelope in envelopes:
            session.receive(envelope, now)
        if session.connected and not self.exchange.peers():
            session.disconnected(now)
        session.heartbeat = self._heartbeat()
        if self._session_id != session.session_id:
            self._session_id = session.session_id
            for target in sender.targets:
                sender.forget(target)
        rates = [each for each in (self._rate, session.hub_status.rate) if each is not None]
        sender.set_rate(min(rates) if rates else None, now)
        for message in session.pump(now):
            sender.enqueue(message)
        self._warn(now)
        return max(0.0, min(sender.pump(now), session.next_due() - now, _MAX_WAIT_SECONDS))

    def _warn(self, now: float) -> None:
        """Log when the hub can't be reached, and when it can again."""
        warning = "" if self.session.connected else self.exchange.problem
        if warning == self._warning and now - self._warned_at < _REPEAT_WARNING_SECONDS:
            return
        if warning:
            log.warning("%s; training goes on alone", warning)
        elif self._warning:
            log.warning("connected to the hub at %s again", self.exchange.address)
        self._warning, self._warned_at = warning, now
