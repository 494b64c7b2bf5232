"""Client of a `RequestServer`: connections that hold the job's key, and notice when the server is gone.

A connection is used by one thread at a time. None of it runs Python in a thread of its own, so an interpreter may end
at any time; heartbeats are libzmq's.
"""

from __future__ import annotations

import math
import os
import struct
import threading
import time
from typing import Any

import msgspec
import zmq

from paceline._core.job_key import JobKey
from paceline.world.store.request_messages import MAX_REQUEST_NBYTES, ServerReply
from paceline.world.store.request_server import CLIENT_KEY, SERVER_KEY

__all__ = ["SILENT_SECONDS", "Connection", "ConnectionLost", "RequestClient"]

SILENT_SECONDS = 10.0
"""Without any answer from the server until it counts as lost."""

_CONNECT_SECONDS = 10.0  # in which a connection to a server that listens is made, even if it is flooded
_AGAIN_SECONDS = 3.0  # the same, to one that was there before
_HEARTBEAT_MS = 1000
_REFUSED_SECONDS, _NEW_SOCKET_SECONDS = 0.05, 0.5  # until another try, where nothing listens and otherwise
_EVENT = struct.Struct("=Hi")
_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not admit the key of this job",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it is another program, or one of the two has no job key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it has another job key, or is another program",
    zmq.EVENT_CLOSED: "nothing listens there",
    zmq.EVENT_DISCONNECTED: "it has another job key, or is another program",
}
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED
for _event in _FAILURES:
    _EVENTS |= _event


class ConnectionLost(Exception):
    """The server is not reachable, or has ended."""


class Connection:
    """One connection to a server, for one thread at a time.

    Args:
        host: of the server.
        port: of the server.
        key: of the job; None: the server has none either.
        connect_seconds: in which the connection must be made.
    """

    def __init__(
        self, host: str, port: int, key: JobKey | None, connect_seconds: float = _CONNECT_SECONDS
    ) -> None:
        self._address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._key, self._connect_seconds = key, connect_seconds
        self._problem = "it does not answer"
        self._connected = self._broken = False
        self._begun = time.monotonic()
        self._unsent: list[list[bytes]] = []
        self._open()

    def send(self, service: bytes, request: msgspec.Struct) -> None:
        """Send a request, now or once the connection is made.

        Raises:
            ValueError: it is too large.
        """
        body = msgspec.json.encode(request)
        if len(body) > 2 * MAX_REQUEST_NBYTES:
            raise ValueError(f"a request of {len(body)} bytes, of {MAX_REQUEST_NBYTES} at most")
        if self._connected:
            self._send([service, body])
        else:
            self._unsent.append([service, body])

    def _send(self, parts: list[bytes]) -> None:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:  # the connection is gone, which `receive` reports
            self._broken = True

    def register(self, poller: zmq.Poller) -> None:
        """Make a poller return when something has happened to this connection."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def receive(self, seconds: float) -> ServerReply | None:
        """Return the next reply; None: none came within `seconds`.

        Raises:
            ConnectionLost: the server is gone or not reachable; no reply will come.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._handle_events()
            try:
                if self._connected:
                    return msgspec.json.decode(self._socket.recv(zmq.NOBLOCK), type=ServerReply)
            except zmq.Again:
                pass
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            poller = zmq.Poller()
            self.register(poller)
            next_try = 60.0 if self._connected else max(0.0, self._next_try - time.monotonic())
            poller.poll(math.ceil(min(left, next_try) * 1000))

    def is_open(self) -> bool:
        """Return whether the connection is made and not known to be lost; one that is lost is closed."""
        try:
            self._handle_events()
        except ConnectionLost:
            self._close(0)
            return False
        return self._connected

    def close(self) -> None:
        """Close the connection, once what was sent is out or 0.2 s have passed."""
        self._close(200)

    def _open(self) -> None:
        self._next_try = time.monotonic() + _NEW_SOCKET_SECONDS
        self._socket = _context().socket(zmq.DEALER)
        options: dict[int, int | bytes] = {
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            zmq.IMMEDIATE: 1,
            # Without end, its events would fill the monitor once nobody reads them, and libzmq's thread would wait.
            zmq.RECONNECT_IVL: -1,
            zmq.HANDSHAKE_IVL: round(_CONNECT_SECONDS * 1000),
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: round(SILENT_SECONDS * 1000),
        }
        if self._key is not None:
            public, secret = self._key.curve_pair(CLIENT_KEY)
            options |= {
                zmq.CURVE_SERVERKEY: self._key.curve_pair(SERVER_KEY)[0],
                zmq.CURVE_PUBLICKEY: public,
                zmq.CURVE_SECRETKEY: secret,
            }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(self._address)

    def _close(self, linger: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger)

    def _handle_events(self) -> None:
        if self._broken:
            raise ConnectionLost("the connection was closed")
        while True:
            try:
                frame, *_ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event, _ = _EVENT.unpack(frame)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                for parts in self._unsent:
                    self._send(parts)
                self._unsent.clear()
            elif self._connected:
                raise ConnectionLost("the connection was closed")
            else:
                self._problem = _FAILURES[event]
                if event == zmq.EVENT_CLOSED:
                    self._next_try = min(self._next_try, time.monotonic() + _REFUSED_SECONDS)
        now = time.monotonic()
        if self._connected:
            return
        if now - self._begun > self._connect_seconds:
            raise ConnectionLost(self._problem)
        if now >= self._next_try:
            self._close(0)
            self._open()


class RequestClient:
    """Sends requests from any thread, each on a connection that no other thread uses.

    A process that was forked gets connections of its own.
    """

    def __init__(self, host: str, port: int, key: JobKey | None) -> None:
        self._place = host, port, key
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._process = os.getpid()
        self._connect_seconds = _CONNECT_SECONDS

    def call(self, service: bytes, request: Any, seconds: float) -> ServerReply:
        """Send a request, and return the reply.

        Raises:
            ConnectionLost: the server is not reachable or has ended.
            TimeoutError: no reply within `seconds`.
        """
        connection = self._take()
        try:
            connection.send(service, request)
            reply = connection.receive(seconds)
        except BaseException:
            connection.close()
            raise
        if reply is None:
            connection.close()
            raise TimeoutError(f"no answer within {seconds:g} s")
        with self._lock:
            self._idle.append(connection)
            self._connect_seconds = _AGAIN_SECONDS
        return reply

    def close(self) -> None:
        """Close all connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> Connection:
        with self._lock:
            if self._process != os.getpid():
                self._idle, self._process = [], os.getpid()
            while self._idle:
                connection = self._idle.pop()
                if connection.is_open():
                    return connection
            seconds = self._connect_seconds
        return Connection(*self._place, seconds)


_shared: tuple[int, zmq.Context[Any]] | None = None
_shared_lock = threading.Lock()


def _context() -> zmq.Context[Any]:
    """Return this process's context; it is never terminated, as a store may be used until the process ends."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared[0] != os.getpid():
            _shared = os.getpid(), zmq.Context()
        return _shared[1]
