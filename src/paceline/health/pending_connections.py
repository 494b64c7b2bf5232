"""Connections of the watchdog that are not authenticated yet: callers of this rank, and its own calls.

Anybody may call. So callers are bounded in number, bytes and time: those without a valid hello, which are strangers or
ranks whose hello is on its way, can't displace those with one, and in either group the oldest of the address with the
most callers makes room for a new one. Nothing blocks: `advance` does what is possible.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.health.heartbeat import FrameParser, MalformedFrame, encode_frame
from paceline.health.peer_endpoint import PeerEndpoint
from paceline.health.peer_handshake import CallerHandshake, FrameSealer, ListenerHandshake

__all__ = ["CONNECT_SECONDS", "AuthenticatedConnection", "CallFailure", "PendingConnections"]

CONNECT_SECONDS = 5.0  # for a call, from its start until it is authenticated
_HELLO_SECONDS = 5.0  # for a caller, likewise
_MAX_STRANGERS = 32  # callers without a valid hello
_MAX_CALLERS = 64  # callers with one
_MAX_ACCEPTED = 256  # callers in one turn
_HANDSHAKE_NBYTES = 400  # of one message
_READ_NBYTES = 1 << 12
_REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET}

PROBE = "probe"
"""Purpose of a call that ends as soon as it is connected: whether a process still listens."""


@dataclass(frozen=True)
class CallFailure:
    """A call that failed.

    Attributes:
        kind: ``"refused"``: no process listens there; ``"unanswered"``: the host does not answer; ``"rejected"``:
            who listens is no rank of this world, or gave this rank up.
        text: for people.
        at: ``time.monotonic()``.
    """

    kind: Literal["refused", "unanswered", "rejected"]
    text: str
    at: float


@dataclass(frozen=True)
class AuthenticatedConnection:
    """A connection whose other end has proved that it is a rank of this world.

    Attributes:
        rank: the other end.
        purpose: one of `PURPOSES`.
        outgoing: whether this rank called.
        socket, parser, sealer: to receive and send frames.
    """

    rank: int
    purpose: str
    outgoing: bool
    socket: socket.socket
    parser: FrameParser
    sealer: FrameSealer


@dataclass(eq=False)
class _Pending:
    socket: socket.socket
    handshake: CallerHandshake | ListenerHandshake
    address: str
    since: float
    parser: FrameParser = field(default_factory=lambda: FrameParser(_HANDSHAKE_NBYTES))
    unsent: bytes = b""
    connected: bool = False

    def write(self) -> None:
        """Send what is left.

        Raises:
            OSError: the connection failed.
        """
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self.unsent = self.unsent[self.socket.send(self.unsent) :]


class PendingConnections:
    """Callers and calls of one rank.

    Args:
        key: of the world.
        own: rank. endpoints: of all ranks.
        listener: non-blocking socket at the own endpoint.

    Attributes:
        failures: the latest failed call to each rank, until a call succeeds.
        ended_calls: how many calls failed.
    """

    def __init__(
        self, key: bytes, own: int, endpoints: Sequence[PeerEndpoint], listener: socket.socket
    ) -> None:
        self._key, self._own, self._endpoints, self._listener = key, own, endpoints, listener
        self._callers: list[_Pending] = []
        self._calls: dict[tuple[int, str], _Pending] = {}
        self.failures: dict[int, CallFailure] = {}
        self.ended_calls = 0

    def call(self, rank: int, purpose: str) -> None:
        """Start to connect to a rank, unless this is under way."""
        if (rank, purpose) in self._calls:
            return
        endpoint = self._endpoints[rank]
        family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            code = connection.connect_ex((endpoint.address, endpoint.port))
        except OSError as error:  # no more descriptors
            self._fail(rank, error)
            return
        handshake = CallerHandshake(self._key, self._own, rank, purpose)
        pending = _Pending(connection, handshake, endpoint.address, time.monotonic())
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self._fail(rank, OSError(code, os.strerror(code)))
        else:
            pending.unsent = b"" if purpose == PROBE else encode_frame(handshake.hello())
            self._calls[rank, purpose] = pending

    def is_calling(self, rank: int, purpose: str) -> bool:
        """Return whether a call is under way."""
        return (rank, purpose) in self._calls

    def _fail(self, rank: int, error: Exception, *, rejected: bool = False) -> None:
        code = error.errno if isinstance(error, OSError) else None
        refused = not rejected and code in _REFUSED
        kind = "refused" if refused else "rejected" if rejected else "unanswered"
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.ended_calls += 1
        self.failures[rank] = CallFailure(kind, text, time.monotonic())

    # ------------------------------------------------------------------ progress

    def poll_events(self, *, callers: bool) -> Iterator[tuple[socket.socket, int]]:
        """Yield the sockets to wait for, with events; `callers`: also for new ones."""
        for pending in self._calls.values():
            yield (
                pending.socket,
                select.POLLIN if pending.connected and not pending.unsent else select.POLLOUT,
            )
        for pending in self._callers:
            if callers or pending.handshake.rank >= 0:
                yield pending.socket, select.POLLIN
        if callers:
            yield self._listener, select.POLLIN

    def advance(self) -> Iterator[AuthenticatedConnection]:
        """Accept callers, do what is possible on all connections, and yield those that are authenticated."""
        now = time.monotonic()
        callers, self._callers = self._callers, []
        for pending in callers:
            yield from self._advance_caller(pending, now)
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, address = self._listener.accept()
            except OSError:
                break
            connection.setblocking(False)
            handshake = ListenerHandshake(self._key, self._own, len(self._endpoints))
            yield from self._advance_caller(_Pending(connection, handshake, address[0], now), now)
        for key, pending in list(self._calls.items()):
            yield from self._advance_call(key, pending, now)

    def _advance_caller(self, caller: _Pending, now: float) -> Iterator[AuthenticatedConnection]:
        handshake = caller.handshake
        assert isinstance(handshake, ListenerHandshake), "of a caller"
        try:
            for message in self._read(caller):
                if handshake.rank < 0:
                    caller.unsent = encode_frame(handshake.challenge(message))
                    continue
                handshake.accept(message)
                yield self._authenticated(caller, handshake.keys)
                return
            caller.write()
            expired = now - caller.since > _HELLO_SECONDS
        except (OSError, MalformedFrame):
            expired = True
        if expired:
            caller.socket.close()
        else:
            self._callers.append(caller)
            self._make_room()

    def _make_room(self) -> None:
        for known, most in ((False, _MAX_STRANGERS), (True, _MAX_CALLERS)):
            group = [each for each in self._callers if (each.handshake.rank >= 0) == known]
            if len(group) > most:
                ((crowded, _),) = Counter(each.address for each in group).most_common(1)
                oldest = next(each for each in group if each.address == crowded)
                oldest.socket.close()
                self._callers.remove(oldest)

    def _advance_call(
        self, key: tuple[int, str], call: _Pending, now: float
    ) -> Iterator[AuthenticatedConnection]:
        rank, purpose = key
        handshake = call.handshake
        assert isinstance(handshake, CallerHandshake), "of a call"
        try:
            self._check_connected(call)
            if call.connected and purpose == PROBE:
                self._end_call(key)
                return
            if call.connected:
                call.write()
                for message in self._read(call):
                    call.unsent += encode_frame(handshake.answer(message))
                    call.write()  # short, so it fits into the socket's empty buffer
                    if call.unsent:
                        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                    del self._calls[key]
                    self.failures.pop(rank, None)
                    yield self._authenticated(call, handshake.keys)
                    return
            if now - call.since > CONNECT_SECONDS:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        except (OSError, MalformedFrame) as error:
            self._end_call(key)
            self._fail(rank, error, rejected=call.connected and not isinstance(error, TimeoutError))

    def _end_call(self, key: tuple[int, str]) -> None:
        self._calls.pop(key).socket.close()

    @staticmethod
    def _check_connected(call: _Pending) -> None:
        if not call.connected:
            code = call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            with contextlib.suppress(OSError):
                call.socket.getpeername()
                call.connected = True

    @staticmethod
    def _read(pending: _Pending) -> Iterator[dict[str, object]]:
        try:
            data = pending.socket.recv(_READ_NBYTES)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the other end closed the connection")
        yield from pending.parser.feed(data)

    @staticmethod
    def _authenticated(pending: _Pending, keys: tuple[bytes, bytes]) -> AuthenticatedConnection:
        handshake, (send, receive) = pending.handshake, keys
        return AuthenticatedConnection(
            handshake.rank,
            handshake.purpose,
            isinstance(handshake, CallerHandshake),
            pending.socket,
            pending.parser.with_key(receive),
            FrameSealer(send),
        )

    def sockets(self) -> list[socket.socket]:
        """Return all sockets, the listener included."""
        return [self._listener, *(each.socket for each in (*self._callers, *self._calls.values()))]
