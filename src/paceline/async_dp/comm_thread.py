"""The thread that talks to a hub while the training thread trains."""

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

_LOOK_SECONDS = 0.5
_TELL_AGAIN_SECONDS = 60.0


class CommThread:
    """Drives a spoke over an exchange, in a thread of its own, until it is closed.

    Args:
        spoke: the conversation. exchange: carries it, and is closed with this.
        rate: bytes per second on the wire that may be sent, None: any.
        beat: returns what the hub is to know of the training, every few seconds.
        cores: that the thread keeps to; empty: any.

    Attributes:
        error: what ended the thread before its time; None if nothing did.
    """

    def __init__(
        self,
        spoke: HubSession,
        exchange: WorkerExchange,
        *,
        rate: float | None,
        beat: Callable[[], dict[str, object]],
        cores: Collection[int] = (),
    ) -> None:
        self.spoke, self.exchange, self.error = spoke, exchange, None
        self._rate, self._beat, self._cores = rate, beat, cores
        self._post = FrameSender(
            exchange,
            lambda: spoke.terms.run,
            lambda: spoke.session,
            rate=rate,
            left=lambda message: spoke.left(message, time.monotonic()),
        )
        self._closing = threading.Event()
        self._session, self._told, self._told_at = spoke.session, "", 0.0
        self._thread = threading.Thread(
            target=self._run, name=f"paceline star {exchange.address}", daemon=True
        )
        self._thread.start()

    error: BaseException | None

    def wake(self) -> None:
        """Have it look at its orders now."""
        self.exchange.wake()

    def close(self, seconds: float = 2.0) -> None:
        """Say goodbye and end the thread."""
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
            if self.spoke.connected:
                self._post.put(self.spoke.goodbye())
                self._post.pump(time.monotonic())
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            self.error = error

    def _turn(self, wait: float) -> float:
        """Take in what came, send what may leave; return the seconds until there is something to do."""
        spoke, post = self.spoke, self._post
        envelopes = self.exchange.poll(wait)
        now = time.monotonic()
        for envelope in envelopes:
            spoke.receive(envelope, now)
        if spoke.connected and not self.exchange.peers():
            spoke.lost(now)
        spoke.beat = self._beat()
        if self._session != spoke.session:
            self._session = spoke.session
            for target in post.targets:
                post.forget(target)
        rates = [each for each in (self._rate, spoke.terms.rate) if each is not None]
        post.limit(min(rates) if rates else None, now)
        for message in spoke.pump(now):
            post.put(message)
        self._tell(now)
        due = min(post.pump(now), spoke.wants() - now, _LOOK_SECONDS)
        return max(0.0, due)

    def _tell(self, now: float) -> None:
        """Tell the user when the hub can't be reached, and when it can again."""
        trouble = "" if self.spoke.connected else self.exchange.problem
        if trouble == self._told and now - self._told_at < _TELL_AGAIN_SECONDS:
            return
        if trouble:
            log.warning("%s; training goes on alone", trouble)
        elif self._told:
            log.warning("in touch with the hub at %s again", self.exchange.address)
        self._told, self._told_at = trouble, now
