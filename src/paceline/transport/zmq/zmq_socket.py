"""ZeroMQ socket with its monitor, and a pipe that wakes the polling thread from other threads.

[Note: bounds] A socket queues `SocketSettings.queue_length` envelopes per peer in each direction; then sends to that
peer are refused. A part that exceeds the frame size ends the connection before memory is allocated for it. What libzmq
does not limit at a hub, `ConnectionGuard` does.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import zmq

from paceline.errors import UsageError
from paceline.transport.envelope import HEAD_LIMIT_NBYTES, PAYLOAD_LIMIT_NBYTES, Bytes
from paceline.transport.message_frames import FRAME_NBYTES
from paceline.transport.transport_interface import HUB

__all__ = ["MAX_WORKER_NUMBER", "SocketSettings", "WakeupFd", "ZmqSocket", "check_worker_number"]

MAX_WORKER_NUMBER = 2**53 - 1
"""Highest worker number: JSON readers represent it exactly."""

_LINGER_MS, _HANDSHAKE_MS = 300, 10_000
_MAX_WAIT_SECONDS = 3600.0
_ENCRYPTION_NBYTES = 64  # CURVE adds 33 bytes to a part
_EVENTS_PER_CALL = 256
_PIPE_NBYTES = 4096  # per read; what is left in the pipe is read by the next one
_BUFFER_SECONDS, _MIN_BUFFER_NBYTES, _MAX_BUFFER_NBYTES = 0.25, 128 << 10, 64 << 20
_EVENT = struct.Struct("=Hi")


class WakeupFd:
    """File descriptor that becomes readable when another thread calls `set`: a pipe, which every system has.

    Example:
        >>> wakeup = WakeupFd()
        >>> wakeup.set()
        >>> wakeup.clear(), wakeup.clear()
        (True, False)
        >>> wakeup.close()
    """

    def __init__(self) -> None:
        self._lock = Lock()  # the number of a closed descriptor may be reused
        self._fd, self._write_fd = os.pipe()
        os.set_blocking(self._fd, False)
        os.set_blocking(self._write_fd, False)

    def fileno(self) -> int:
        """Return the descriptor, −1 once it is closed."""
        return self._fd

    def set(self) -> None:
        """Make it readable; from any thread, and without effect once it is closed."""
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe is readable
            if self._fd >= 0:
                os.write(self._write_fd, b"\0")

    def clear(self) -> bool:
        """Return whether it was set since the last call."""
        try:
            return bool(os.read(self._fd, _PIPE_NBYTES))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the descriptor; closing twice is allowed."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                os.close(self._write_fd)
            self._fd = -1


@dataclass(frozen=True)
class SocketSettings:
    """Settings of a hub's or worker's socket.

    Attributes:
        frame_nbytes: maximum size of a payload.
        rate: bytes per second at which the kernel paces each connection; None: unlimited.
        peer_timeout: seconds after which a peer that does not answer counts as gone; long enough for a frame.
        queue_length: maximum number of queued envelopes per peer and direction.

    Raises:
        UsageError: a value is out of range.
    """

    frame_nbytes: int = FRAME_NBYTES
    rate: float | None = None
    peer_timeout: float = 30.0
    queue_length: int = 8

    def __post_init__(self) -> None:
        for name, kinds, limit in _VALID:
            value: Any = getattr(self, name)
            if name == "rate" and self.rate is None:
                continue
            if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value <= limit:
                raise UsageError(
                    f"{name}={value!r} is out of range",
                    remedy=f"give a {kinds[0].__name__} above 0, at most {limit:g}",
                )


_VALID: tuple[tuple[str, tuple[type, ...], float], ...] = (
    ("frame_nbytes", (int,), PAYLOAD_LIMIT_NBYTES),
    ("rate", (float, int), 1e12),
    ("peer_timeout", (float, int), 6000.0),
    ("queue_length", (int,), 10_000),
)


def check_worker_number(number: int) -> None:
    """Raise unless a number is in the range of worker numbers.

    Raises:
        UsageError: it is not.
    """
    if isinstance(number, bool) or not isinstance(number, int) or not HUB < number <= MAX_WORKER_NUMBER:
        raise UsageError(
            f"{number!r} is not a worker number",
            remedy=f"draw one at random from 1 to {MAX_WORKER_NUMBER}",
        )


class ZmqSocket:
    """A socket that is not yet bound or connected; for use by one thread.

    Args:
        context: of the endpoint.
        kind: ``zmq.ROUTER`` or ``zmq.DEALER``.
        settings: see `SocketSettings`.
        events: monitor events to report.
        ipv6: whether the address is an IPv6 address.

    Attributes:
        raw: the pyzmq socket.
        monitor: socket that reports its events.
        port: of a bound hub; None if it has none.
    """

    port: int | None = None

    def __init__(
        self,
        context: zmq.Context[Any],
        kind: int,
        settings: SocketSettings,
        *,
        events: int,
        ipv6: bool = False,
    ) -> None:
        self.raw = context.socket(kind)
        timeout = max(1, round(settings.peer_timeout * 1000))
        options = {
            zmq.LINGER: _LINGER_MS,
            zmq.SNDHWM: settings.queue_length,
            zmq.RCVHWM: settings.queue_length,
            zmq.MAXMSGSIZE: max(settings.frame_nbytes, HEAD_LIMIT_NBYTES) + _ENCRYPTION_NBYTES,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: max(1, timeout // 6),
            zmq.HEARTBEAT_TIMEOUT: timeout,
            zmq.HEARTBEAT_TTL: timeout,
            zmq.IPV6: int(ipv6),
        }
        if settings.rate is not None:
            wanted = round(settings.rate * _BUFFER_SECONDS)
            options[zmq.SNDBUF] = max(_MIN_BUFFER_NBYTES, min(_MAX_BUFFER_NBYTES, wanted))
        for option, value in options.items():
            self.raw.setsockopt(option, value)
        self.monitor = self.raw.get_monitor_socket(events)
        self._poller = zmq.Poller()
        self._poller.register(self.raw, zmq.POLLIN)

    def watch(self, other: zmq.Socket[Any] | WakeupFd) -> None:
        """Make `wait` return when `other` is readable too."""
        self._poller.register(other, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Wait until something is readable, at most `seconds`."""
        self._poller.poll(math.ceil(max(0.0, min(seconds, _MAX_WAIT_SECONDS)) * 1000))

    def send(self, parts: Sequence[Bytes]) -> None:
        """Send a message of several parts, all or nothing.

        Raises:
            zmq.Again: the queue is full, or there is no connection.
            zmq.ZMQError: EHOSTUNREACH if there is no such peer.
        """
        lost: zmq.Again | None = None
        for index, part in enumerate(parts):
            more = zmq.SNDMORE if index < len(parts) - 1 else 0
            try:
                self.raw.send(part, zmq.NOBLOCK | more, copy=not _is_immutable(part))
            except zmq.Again as error:
                if index == 0:
                    raise
                lost = error  # the connection ended: libzmq drops the rest, up to the last part
        if lost is not None:
            raise lost

    def receive(self, max_parts: int) -> list[zmq.Frame] | None:
        """Return at most `max_parts` parts of the next message, None if there is none."""
        try:
            part = self.raw.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        parts = [part]
        while part.more:
            part = self.raw.recv(copy=False)  # messages arrive whole
            if len(parts) < max_parts:
                parts.append(part)
        return parts

    def events(self) -> list[tuple[int, int]]:
        """Return the next monitor events with their values, at most a batch."""
        events = []
        while len(events) < _EVENTS_PER_CALL:
            try:
                frame, *_ = self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event, value = _EVENT.unpack(frame)
            events.append((event, value))
        return events

    def close(self, linger: int | None = None) -> None:
        """Close the socket.

        Args:
            linger: milliseconds to send what is queued; None: 300.
        """
        while self.events():
            pass  # libzmq blocks while its monitor queue is full
        with contextlib.suppress(zmq.ZMQError):  # already closed
            self.raw.disable_monitor()
        self.monitor.close(0)
        self.raw.close(linger)


def _is_immutable(part: Bytes) -> bool:
    """Return whether a part can't change, so that it need not be copied."""
    return isinstance(part, bytes) or (isinstance(part, memoryview) and isinstance(part.obj, bytes))
