"""A bell: any thread rings it, and one that waits for several things at once hears it.

One ZeroMQ socket with what belongs to it: its context, its monitor, and a bell that wakes who waits for it.

[Note: bounds] A socket takes `SocketSettings.queue` envelopes for each peer and holds as many that came from
it; then who
sends is told so. A part of an envelope that is longer than a frame may be ends the connection before memory is taken
for it. What libzmq does not bound is how many parts one message has while its last is still to come: only peers that
are trusted with a key, or with this machine, can send that.
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

__all__ = ["MAX_WORKER_NUMBER", "SocketSettings", "WakeupFd", "ZmqSocket", "worker_identity", "worker_number"]


class WakeupFd:
    """Has a file descriptor that can be read from once it was rung (eventfd(2)).

    Example:
        >>> bell = WakeupFd()
        >>> bell.ring()
        >>> bell.hush(), bell.hush()
        (True, False)
        >>> bell.close()
    """

    def __init__(self) -> None:
        self._lock = Lock()  # a number that was closed may be another file's soon
        self._handle = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor, −1 once it is closed."""
        return self._handle

    def ring(self) -> None:
        """Ring; from any thread, and in vain once it is closed."""
        with self._lock:
            if self._handle >= 0:
                os.eventfd_write(self._handle, 1)

    def hush(self) -> bool:
        """Return whether it was rung since the last call."""
        try:
            return os.eventfd_read(self._handle) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Give the descriptor back; closing twice is closing once."""
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1


MAX_WORKER_NUMBER = 2**53 - 1
"""The highest number of a worker: JSON readers keep it exactly."""


_LINGER_MS, _HANDSHAKE_MS = 300, 10_000


_LONGEST_WAIT_SECONDS = 3600.0


_ENCRYPTION_NBYTES = 64  # what CURVE adds to a part: 33 bytes


_EVENTS_A_LOOK = 256


_BUFFER_SECONDS, _LEAST_BUFFER_NBYTES, _MOST_BUFFER_NBYTES = 0.25, 128 << 10, 64 << 20


_IDENTITY, _EVENT = struct.Struct(">Q"), struct.Struct("=Hi")


_WORKER_BIT = 1 << 63  # ZeroMQ keeps identities that begin with a zero byte to itself


@dataclass(frozen=True)
class SocketSettings:
    """How a socket of a star is set.

    Args:
        frame_nbytes: the most bytes of a payload.
        rate: bytes per second that each connection is held to by the kernel; None: as fast as it goes.
        silence: seconds after which a peer that answers nothing counts as gone; a frame must get through in them.
        queue: envelopes that wait for one peer, and that wait from one, before its sender is told.

    Raises:
        UsageError: a value that can't be.
    """

    frame_nbytes: int = FRAME_NBYTES
    rate: float | None = None
    peer_timeout: float = 30.0
    queue: int = 8

    def __post_init__(self) -> None:
        for name, kinds, most in _VALID:
            value = getattr(self, name)
            if not (value is None and name == "rate") and not _is_number(value, kinds, most):
                raise UsageError(
                    f"{name}={value!r} can't be",
                    remedy=f"give a {kinds[0].__name__} above 0, at most {most:g}",
                )


_VALID: tuple[tuple[str, tuple[type, ...], float], ...] = (
    ("frame_nbytes", (int,), PAYLOAD_LIMIT_NBYTES),
    ("rate", (float, int), 1e12),
    ("silence", (float, int), 6000.0),
    ("queue", (int,), 10_000),
)


def _is_number(value: Any, kinds: tuple[type, ...], most: float) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value <= most


def worker_identity(number: int) -> bytes:
    """Return the routing identity of a worker: its number in 8 bytes, the first of them never 0.

    Raises:
        UsageError: it is no number of a worker.
    """
    if isinstance(number, bool) or not isinstance(number, int) or not HUB < number <= MAX_WORKER_NUMBER:
        raise UsageError(
            f"{number!r} is no number of a worker", remedy=f"draw one at random from 1 to {MAX_WORKER_NUMBER}"
        )
    return _IDENTITY.pack(number | _WORKER_BIT)


def worker_number(identity: Bytes) -> int | None:
    """Return the number of the worker that has this identity, None if it is nobody's."""
    if len(identity) != _IDENTITY.size:
        return None
    (value,) = _IDENTITY.unpack(identity)
    number = value ^ _WORKER_BIT
    return number if HUB < number <= MAX_WORKER_NUMBER else None


class ZmqSocket:
    """A socket that is neither bound nor connected yet; for one thread, but for its bell.

    Args:
        context: of the exchange that it belongs to.
        kind: ``zmq.ROUTER`` or ``zmq.DEALER``.
        settings: see `SocketSettings`.
        events: those of the monitor that are wanted.
        ipv6: the address is one of IPv6.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        kind: int,
        settings: SocketSettings,
        *,
        events: int,
        ipv6: bool = False,
    ) -> None:
        self.socket = context.socket(kind)
        peer_timeout = max(1, round(settings.peer_timeout * 1000))
        options = {
            zmq.LINGER: _LINGER_MS,
            zmq.SNDHWM: settings.queue,
            zmq.RCVHWM: settings.queue,
            zmq.MAXMSGSIZE: max(settings.frame_nbytes, HEAD_LIMIT_NBYTES) + _ENCRYPTION_NBYTES,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: max(1, peer_timeout // 6),
            zmq.HEARTBEAT_TIMEOUT: peer_timeout,
            zmq.HEARTBEAT_TTL: peer_timeout,
            zmq.IPV6: int(ipv6),
        }
        if settings.rate is not None:
            wanted = round(settings.rate * _BUFFER_SECONDS)
            options[zmq.SNDBUF] = max(_LEAST_BUFFER_NBYTES, min(_MOST_BUFFER_NBYTES, wanted))
        for option, value in options.items():
            self.socket.setsockopt(option, value)
        self._monitor = self.socket.get_monitor_socket(events)
        self._poller = zmq.Poller()
        for each in (self.socket, self._monitor):
            self._poller.register(each, zmq.POLLIN)

    def listen_to(self, other: zmq.Socket[bytes] | WakeupFd) -> None:
        """Have `wait` end when there is something for `other` too."""
        self._poller.register(other, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Return once there is something to receive or look at, or time is up."""
        self._poller.poll(math.ceil(max(0.0, min(seconds, _LONGEST_WAIT_SECONDS)) * 1000))

    def send(self, parts: Sequence[Bytes]) -> None:
        """Send a message of several parts, all or nothing.

        Raises:
            zmq.Again: there is no room, or nobody is connected.
            zmq.ZMQError: EHOSTUNREACH: there is no such peer.
        """
        lost: zmq.Again | None = None
        for index, part in enumerate(parts):
            more = zmq.SNDMORE if index < len(parts) - 1 else 0
            try:
                self.socket.send(part, zmq.NOBLOCK | more, copy=not _stays(part))
            except zmq.Again as error:
                if index == 0:
                    raise
                lost = error  # the connection ended: libzmq drops the rest, up to the last part
        if lost is not None:
            raise lost

    def receive(self, most_parts: int) -> list[memoryview] | None:
        """Return the next message, None if there is none; of its parts no more than `most_parts`."""
        try:
            part = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        parts = [part.buffer]
        while part.more:
            part = self.socket.recv(copy=False)  # messages come whole
            if len(parts) < most_parts:
                parts.append(part.buffer)
        return parts

    def events(self) -> list[tuple[int, int]]:
        """Return what the monitor saw, and the value that goes with each; not all at once where that is much."""
        seen = []
        while len(seen) < _EVENTS_A_LOOK:
            try:
                told, *_ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event, value = _EVENT.unpack(told)
            seen.append((event, value))
        return seen

    def close(self, linger: int | None = None) -> None:
        """Close the socket.

        Args:
            linger: milliseconds for what has not left yet; None: 300.
        """
        while self.events():
            pass  # libzmq waits for room to tell the next event
        with contextlib.suppress(zmq.ZMQError):  # it is closed already
            self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(linger)


def _stays(part: Bytes) -> bool:
    """Return whether the bytes of a part can't change, so that they need not be copied."""
    return isinstance(part, bytes) or (isinstance(part, memoryview) and isinstance(part.obj, bytes))
