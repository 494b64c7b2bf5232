"""Guards the connections of a hub, in a thread of its own.

It admits workers, ends the connections of withdrawn keys, and limits what others can occupy before they are admitted.
A hub that merges or writes for seconds thus neither keeps new workers waiting nor leaves strangers in.

[Note: ending a connection] libzmq can't disconnect a peer. It reports the descriptor of each accepted connection, and
with each message the descriptor that it arrived through. Shutting that socket down ends the connection as if the peer
had ended it. libzmq may close a descriptor at any time, and the system reuse it; so a duplicate is taken first, and is
shut down only if it is still the socket that was accepted.

[Note: no limit in libzmq] It limits neither the number of connections before authentication nor the number of parts of
an unfinished message. On Linux the kernel counts a connection's bytes: a connection that received no more than a
handshake needs was not admitted; one that sent far more than arrived here as messages has an unfinished one.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from paceline.transport.token_bucket import set_kernel_pacing
from paceline.transport.zmq.zap_auth import ZapAuthenticator
from paceline.transport.zmq.zmq_socket import SocketSettings, WakeupFd, ZmqSocket

__all__ = ["GUARD_EVENTS", "ConnectionGuard"]

MAX_STRANGERS = 256
"""Connections that are not admitted after `_HANDSHAKE_SECONDS`; thousands of workers may connect at the same time."""

_HANDSHAKE_SECONDS = 2.0  # libzmq itself ends a handshake after ten
_STRANGER_NBYTES = 16 << 10  # a handshake takes less than 1 KiB
_CURVE_HANDSHAKE_NBYTES, _NULL_HANDSHAKE_NBYTES = (
    250,
    80,
)  # the hub sends less to a peer that it does not admit
_UNFINISHED_NBYTES, _OVERHEAD = 64 << 20, 1.05  # kernel buffers and heartbeats; framing
_CHECK_SECONDS, _TURN_MS = 0.5, 500
_INFO_NBYTES, _COUNTERS = (
    136,
    struct.Struct("=QQ"),
)  # bytes acknowledged, received: <linux/tcp.h>

_FAILED_HANDSHAKES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "invalid handshake",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "aborted handshake",
}
GUARD_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(slots=True)
class _Connection:
    """An accepted connection."""

    fd: int
    inode: int  # of the socket, since the descriptor may be reused
    address: str  # of the peer; empty for a Unix socket
    accepted_at: float
    key: str | None = None  # of its worker; None: no message arrived yet
    arrived_nbytes: int = 0  # in messages
    sent_nbytes: int = 0  # that the peer acknowledged, and those received from it, when last read
    received_nbytes: int = 0


class ConnectionGuard:
    """Starts the thread; see the module.

    Args:
        hub_socket: of the hub; its monitor is read here only.
        authenticator: used by this thread only, except for `ZapAuthenticator.admits` and `ZapAuthenticator.name_of`.
        settings: of the socket.
        max_connections: limit that leaves descriptors for the hub's files.
    """

    def __init__(
        self,
        hub_socket: ZmqSocket,
        authenticator: ZapAuthenticator,
        settings: SocketSettings,
        *,
        max_connections: int,
    ) -> None:
        self._socket, self._authenticator, self._settings = hub_socket, authenticator, settings
        self._max_connections = max_connections
        self._unfinished_nbytes = 3 * settings.queue_length * settings.frame_nbytes + _UNFINISHED_NBYTES
        self._connections: dict[int, _Connection] = {}  # the oldest first
        self._ended: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._stopping, self._wakeup = False, WakeupFd()
        self._thread = threading.Thread(target=self._run, name="paceline hub connections", daemon=True)
        self._thread.start()

    def rejected(self) -> Counter[str]:
        """Return the number of connections that were rejected or ended, by reason."""
        with self._lock:
            return self._ended + self._authenticator.rejected

    def check(self) -> None:
        """Raise the error that ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def arrived(self, fd: int, key: str, nbytes: int) -> bool:
        """Record a message; return False if its key is not admitted any more, which ends the connection.

        Args:
            fd: descriptor that it arrived through.
            key: that authenticated the connection; empty: none.
            nbytes: size of the message.
        """
        connection = self._connections.get(fd)
        if connection is not None:
            connection.key = key
            connection.arrived_nbytes += nbytes
        return self._authenticator.admits(key)

    def close(self) -> None:
        """End the thread; connections stay as they are."""
        self._stopping = True
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._authenticator.socket, self._socket.monitor, self._wakeup):
            poller.register(each, zmq.POLLIN)
        checked_at = time.monotonic()
        try:
            while not self._stopping:
                poller.poll(_TURN_MS)
                with self._lock:
                    self._authenticator.answer_requests()
                    self._handle_events()
                    excess = len(self._connections) - self._max_connections
                    if excess > 0:
                        self._read_counters()
                        self._end_strangers(self._strangers(), excess)
                    if time.monotonic() >= checked_at + _CHECK_SECONDS:
                        checked_at = time.monotonic()
                        self._read_counters()
                        slow = self._strangers(checked_at - _HANDSHAKE_SECONDS)
                        self._end_strangers(slow, len(slow) - MAX_STRANGERS)
                        self._end_withdrawn()
                        self._end_oversized()
        except BaseException as error:  # noqa: BLE001 - raised by the hub's next poll
            self._error = error

    def _handle_events(self) -> None:
        for event, value in self._socket.events():
            if event in _FAILED_HANDSHAKES:
                self._ended[_FAILED_HANDSHAKES[event]] += 1
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections.pop(value, None)
            elif event == zmq.EVENT_ACCEPTED:
                self._add(value)

    def _add(self, fd: int) -> None:
        self._connections.pop(fd, None)
        try:
            with _duplicate(fd) as peer:
                name = peer.getpeername()
                address = str(name[0]) if isinstance(name, tuple) else ""
                self._connections[fd] = _Connection(
                    fd, os.fstat(peer.fileno()).st_ino, address, time.monotonic()
                )
        except OSError:
            return  # it is gone
        if self._settings.rate is not None and address:
            set_kernel_pacing(fd, self._settings.rate, port=self._socket.port)

    # ------------------------------------------------------------------ ending connections

    def _end(self, connection: _Connection, reason: str) -> None:
        """End a connection; see [Note: ending a connection]."""
        self._connections.pop(connection.fd, None)
        with contextlib.suppress(OSError), _duplicate(connection.fd, connection.inode) as peer:
            peer.shutdown(socket.SHUT_RDWR)
            self._ended[reason] += 1

    def _end_withdrawn(self) -> None:
        """End connections whose keys are not admitted any more; those that sent nothing have to authenticate again."""
        removed = self._authenticator.reload()
        for connection in list(self._connections.values()):
            if connection.key is not None and not self._authenticator.admits(connection.key):
                self._end(connection, "withdrawn key")
            elif connection.key is None and removed and self._is_admitted(connection):
                self._end(connection, "unknown after a key was withdrawn")

    def _strangers(self, before: float = math.inf) -> list[_Connection]:
        """Return the connections accepted before a time that are not admitted, the oldest first."""
        return [
            each
            for each in self._connections.values()
            if each.key is None and each.accepted_at <= before and not self._is_admitted(each)
        ]

    def _end_strangers(self, strangers: list[_Connection], count: int) -> None:
        """End so many of these connections: those from the most frequent address, the oldest first."""
        common = Counter(each.address for each in strangers)
        for connection in sorted(strangers, key=lambda each: -common[each.address])[: max(0, count)]:
            self._end(connection, "no handshake")

    def _end_oversized(self) -> None:
        """End connections that sent too much before a whole message; see [Note: no limit in libzmq]."""
        for connection in list(self._connections.values()):
            received = connection.received_nbytes
            if connection.key is None and not self._is_admitted(connection):
                if received > _STRANGER_NBYTES:
                    self._end(connection, "oversized handshake")
            elif received > connection.arrived_nbytes * _OVERHEAD + self._unfinished_nbytes:
                self._end(connection, "unfinished message")

    def _read_counters(self) -> None:
        """Read how many bytes each connection has transferred; only Linux counts them."""
        if not sys.platform.startswith("linux"):
            return
        for connection in self._connections.values():
            if connection.address:
                with contextlib.suppress(OSError), _duplicate(connection.fd, connection.inode) as peer:
                    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_NBYTES)
                    if len(info) == _INFO_NBYTES:
                        counters = _COUNTERS.unpack_from(info, _INFO_NBYTES - _COUNTERS.size)
                        connection.sent_nbytes, connection.received_nbytes = counters

    @property
    def _handshake_nbytes(self) -> int:
        return _CURVE_HANDSHAKE_NBYTES if self._authenticator.has_keys else _NULL_HANDSHAKE_NBYTES

    def _is_admitted(self, connection: _Connection) -> bool:
        """Return whether a connection that sent no message is known to have been admitted."""
        return connection.sent_nbytes > self._handshake_nbytes


@contextlib.contextmanager
def _duplicate(fd: int, inode: int | None = None) -> Iterator[socket.socket]:
    """Yield a duplicate of a connection's socket.

    Raises:
        OSError: the descriptor was closed, or is of something else by now.
    """
    duplicate = os.dup(fd)
    try:
        if inode is not None and os.fstat(duplicate).st_ino != inode:
            raise OSError("the descriptor was reused")
        # Given type and protocol, Python does not ask the kernel for them; nor for the family if it is not needed.
        family = -1 if inode is None else socket.AF_INET
        peer = socket.socket(family, socket.SOCK_STREAM, 0, fileno=duplicate)
    except BaseException:
        os.close(duplicate)
        raise
    with peer:
        yield peer
