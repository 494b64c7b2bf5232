"""Server of requests over ZeroMQ: clients need the job's key, and every connection is encrypted (CURVE).

[Note: authentication] The keys of both ends are derived from the job's key. libzmq completes no handshake with a client
that does not hold the server's public key, which is no more public than the job's key, and pyzmq's authenticator
rejects every client key but the derived one. Before that a caller costs a descriptor, a few hundred bytes and two
multiplications on the curve, for `_HANDSHAKE_MS` at most; `ConnectionLimit` bounds their number.

[Note: lost connections] libzmq notices a closed connection at once, and a silent one by its heartbeats, which its own
thread sends and answers. Its monitor reports descriptors, its messages carry theirs (ZMQ_SRCFD), and a descriptor's end
is reported before its number can be used again; so the server knows which client is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from paceline._core.file_limit import raise_file_limit
from paceline._core.job_key import JobKey
from paceline.world.store.connection_limit import ConnectionLimit
from paceline.world.store.request_messages import MAX_REQUEST_NBYTES, RequestHandler, SentReply

__all__ = ["CLIENT_KEY", "HEARTBEAT_TIMEOUT_SECONDS", "SERVER_KEY", "RequestServer"]

CLIENT_KEY, SERVER_KEY = "store-client", "store-server"
"""Purposes of the keys that are derived from the job's."""

HEARTBEAT_TIMEOUT_SECONDS = 4.0
"""How long a connection may be silent."""

_HEARTBEAT_MS, _HANDSHAKE_MS = 1000, 3000
_MAX_PENDING = 512
_WANTED_FILES = 1 << 16
_MESSAGES_PER_TURN = 256
_BACKLOG = 1024
_MAX_WAIT_SECONDS = 60.0
_ENCRYPTION_NBYTES = 64  # CURVE adds 33 bytes to a frame
_EVENT = struct.Struct("=Hi")
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_DOMAIN = "paceline-store"


class RequestServer:
    """Answers requests in a thread until it is closed; see [Note: authentication].

    Args:
        host: IP address to listen at; ``"*"``: all addresses.
        port: 0: any free one.
        key: of the job; None: everybody who reaches the port is admitted, and nothing is encrypted.
        handlers: by the name of their service; called by the server's thread only.

    Attributes:
        port: where it listens.

    Raises:
        OSError: it can't listen there.
    """

    def __init__(
        self, host: str, port: int, key: JobKey | None, handlers: Mapping[bytes, RequestHandler]
    ) -> None:
        self._handlers = dict(handlers)
        self._limit = ConnectionLimit(max(16, min(_MAX_PENDING, raise_file_limit(_WANTED_FILES) // 4)))
        self._client_of: dict[int, bytes] = {}
        self._fd_of: dict[bytes, int] = {}
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = _authenticator(self._context, key)
        self._router = self._context.socket(zmq.ROUTER)
        self._monitor = self._router.get_monitor_socket(_EVENTS)
        self._stop_reader, self._stop_writer = os.pipe()
        try:
            _protect(self._router, key)
            self.port = _bind(self._router, host, port)
        except BaseException:
            self._close()
            raise
        atexit.register(self.close)  # pyzmq's authenticator can't be stopped once the interpreter ends
        self._thread = threading.Thread(target=self._run, name="paceline-store-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; connections are closed. Closing twice is allowed."""
        atexit.unregister(self.close)
        if not self._context.closed:
            os.write(self._stop_writer, b"\0")
            self._thread.join()
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close(200)  # milliseconds for the last replies
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._stop_reader)
        os.close(self._stop_writer)

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._router, self._monitor, self._stop_reader):
            poller.register(each, zmq.POLLIN)
        while True:
            now = time.monotonic()
            due = min(handler.next_due() for handler in self._handlers.values())
            wait = min(max(0.0, due - now), _MAX_WAIT_SECONDS)
            ready = dict(poller.poll(math.ceil(wait * 1000)))
            if self._stop_reader in ready:
                return
            self._handle_events()
            self._receive()
            now = time.monotonic()
            for handler in self._handlers.values():
                if handler.next_due() <= now:
                    self._send(_guarded(handler.advance, now))

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                first, *parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            client = first.bytes
            self._note_connection(client, int(first.get(zmq.SRCFD)))
            handler = self._handlers.get(parts[0].bytes) if len(parts) == 2 else None
            if handler is not None:
                self._send(_guarded(handler.receive, client, parts[1].bytes, time.monotonic()))

    def _note_connection(self, client: bytes, fd: int) -> None:
        """Record the descriptor of a client's connection, which shows that it is authenticated."""
        if self._fd_of.get(client) == fd:
            return
        self._handle_events()  # so that the end of the descriptor's last connection is handled before
        self._limit.remove(fd)
        self._client_of[fd], self._fd_of[client] = client, fd

    def _handle_events(self) -> None:
        while True:
            try:
                frame, *_ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, fd = _EVENT.unpack(frame)
            if event == zmq.EVENT_ACCEPTED:
                source = _peer_of(fd, self.port)
                dropped = self._limit.add(fd, source[0]) if source else None
                if dropped is not None:
                    _drop(dropped, self.port)
                continue
            self._limit.remove(fd)
            client = self._client_of.pop(fd, None)
            if client is not None:
                del self._fd_of[client]
                for handler in self._handlers.values():
                    self._send(_guarded(handler.disconnected, client, time.monotonic()))

    def _send(self, replies: Iterable[SentReply]) -> None:
        for client, body in replies:
            with contextlib.suppress(zmq.ZMQError):  # it is gone
                self._router.send_multipart([client, body], zmq.NOBLOCK)


def _guarded(handle: Callable[..., Iterable[SentReply]], *arguments: object) -> Iterable[SentReply]:
    """Return the replies of a handler; log an error in it, so that it does not end the server for all clients."""
    try:
        return handle(*arguments)
    except Exception:
        logging.getLogger(__name__).exception("a request to the job's store failed")
        return ()


def _authenticator(context: zmq.Context[Any], key: JobKey | None) -> ThreadAuthenticator | None:
    if key is None:
        return None
    quiet = logging.getLogger("paceline.zap")  # it would log keys
    quiet.disabled = True
    authenticator = ThreadAuthenticator(context, log=quiet)
    authenticator.configure_curve_callback(_DOMAIN, _OneClientKey(key.curve_pair(CLIENT_KEY)[0]))
    authenticator.start()
    return authenticator


class _OneClientKey:
    """Credentials of the authenticator: one public key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def _protect(router: zmq.Socket[bytes], key: JobKey | None) -> None:
    """Set the options of a socket that is not bound yet."""
    options = {
        zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
        zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: round(HEARTBEAT_TIMEOUT_SECONDS * 1000),
        zmq.MAXMSGSIZE: 2 * MAX_REQUEST_NBYTES + _ENCRYPTION_NBYTES,  # values grow by a third as JSON
        zmq.BACKLOG: _BACKLOG,
        zmq.IPV6: 1,
        zmq.LINGER: 0,
    }
    if key is not None:
        options |= {zmq.CURVE_SERVER: 1, zmq.ZAP_ENFORCE_DOMAIN: 1}
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        router.setsockopt(zmq.CURVE_SECRETKEY, key.curve_pair(SERVER_KEY)[1])
    for option, value in options.items():
        router.setsockopt(option, value)


def _bind(router: zmq.Socket[bytes], host: str, port: int) -> int:
    address = f"[{host}]" if ":" in host else host
    if host != "*" and ":" not in host:
        router.setsockopt(zmq.IPV6, 0)
    try:
        router.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from None
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])


def _peer_of(fd: int, port: int) -> tuple[str, int] | None:
    """Return address and port of the other end of a connection to `port`; None: it is closed by now."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        if connection.getsockname()[1] == port:
            return connection.getpeername()[:2]
    return None


def _drop(fd: int, port: int) -> None:
    """Close a connection of libzmq, which then sees its end; never one of anything else that got its number."""
    if _peer_of(fd, port) is not None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
