"""The communication thread: exchanges messages with a hub while the training thread trains."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection

from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.session_driver import SessionDriver
from paceline.errors import UsageError
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
        self._heartbeat, self._cores = heartbeat, cores
        self._driver = SessionDriver(session, exchange, time.monotonic, rate=rate)
        self._closing, self._reachable, self._standby = threading.Event(), False, ""
        self._warning, self._warned_at = "", 0.0
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
            self._driver.say_goodbye(time.monotonic())
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            self.error = error

    def _turn(self, wait: float) -> float:
        """Receive for up to `wait` seconds, send what may be sent; return how long to wait next."""
        envelopes = self.exchange.poll(wait)
        now = time.monotonic()
        self.session.heartbeat = self._heartbeat()
        wait = self._driver.turn(envelopes, now)
        self._find_hub(now)
        self._warn(now)
        return max(0.0, min(wait, _MAX_WAIT_SECONDS))

    def _find_hub(self, now: float) -> None:
        """Connect to another hub if this one is a standby or superseded; say hello to one that can be reached again."""
        status = self.session.hub_status
        if status.standby and status.standby != self._standby:
            self._standby = status.standby
            try:
                self.exchange.add_alternative(status.standby)
            except UsageError as error:
                log.warning("the hub names a standby that can't be used: %s", error)
        if status.is_other_wanted:
            status.is_other_wanted = False
            self.exchange.try_alternative()
        reachable = bool(self.exchange.peers())
        if reachable and not self._reachable:
            self.session.reachable(now)
        self._reachable = reachable

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
