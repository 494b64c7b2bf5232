"""TCP connections between the watchdogs of all ranks.

Up to 16 ranks all are connected with all; above, each with those at distances 1, 2, 4, … in both directions, which
relay what is new. TCP, not datagrams, since the kernel reports state without help of the process at the other end: the
end of a connection means that the process is gone (at once, whatever ended it), and unacknowledged bytes that its host
is unreachable; while a process that is stopped, or whose threads all wait for Python's lock, keeps a connection that
acknowledges bytes and sends nothing. Tracebacks arrive whole.

The higher rank connects to the lower one and presents a token that only the ranks of this world have.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from paceline.health.heartbeat import FrameParser, MalformedFrame, encode_frame
from paceline.health.peer_endpoint import PeerEndpoint

__all__ = ["CONNECT_SECONDS", "FULL_MESH", "PeerLink", "PeerMesh", "mesh_peers"]

FULL_MESH = 16
"""Ranks up to which all are connected with all."""

_HELLO_SECONDS = 10.0  # for a caller to authenticate
CONNECT_SECONDS = 5.0  # for a call, and for the peers to call
_MAX_BACKLOG_NBYTES = 1 << 20  # unsent bytes per peer
_DROP_NBYTES = _MAX_BACKLOG_NBYTES // 16  # from which droppable messages are dropped
_READ_NBYTES = 1 << 16
_MAX_DUMP_NBYTES = 1 << 16
_TCP_INFO = struct.Struct("=8x48xI")  # ms since the last acknowledgement (struct tcp_info in linux/tcp.h)
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


def mesh_peers(rank: int, ranks: int) -> list[int]:
    """Return the ranks that `rank` is connected with; the relation is symmetric.

    Example:
        >>> mesh_peers(0, 4), mesh_peers(0, 20)
        ([1, 2, 3], [1, 2, 4, 8, 12, 16, 18, 19])
    """
    if ranks <= FULL_MESH:
        return [other for other in range(ranks) if other != rank]
    distances = [1 << power for power in range(ranks.bit_length()) if 1 << power < ranks]
    found = {(rank + sign * distance) % ranks for distance in distances for sign in (1, -1)}
    return sorted(found - {rank})


@dataclass(eq=False)
class PeerLink:
    """A connection to a rank.

    Attributes:
        rank: its number; −1 until it has authenticated.
        state: ``"open"``, ``"closed"`` (by the other end), ``"lost"`` (its host does not answer) or ``"none"`` (ended
            here after a malformed message).
        since: time of the latest change of `state`.
    """

    rank: int
    socket: socket.socket
    _: KW_ONLY
    state: str = "open"
    since: float = field(default_factory=time.monotonic)
    parser: FrameParser = field(default_factory=FrameParser)
    backlog: bytearray = field(default_factory=bytearray)


class PeerMesh:
    """The connections of this rank.

    Args:
        own: this rank's endpoint.
        endpoints: of all ranks.
        listener: the socket at the own endpoint.
        lost: seconds of unacknowledged bytes after which a host counts as unreachable.

    Attributes:
        links: connections by rank.
        dump: connection to the next rank, to which this process writes stacks without Python's lock; None: none.
    """

    def __init__(
        self, own: PeerEndpoint, endpoints: list[PeerEndpoint], listener: socket.socket, lost: float
    ) -> None:
        self.own, self.endpoints = own, endpoints
        self._listener, self._lost, self._token = listener, lost, endpoints[0].token
        self._peers = mesh_peers(own.rank, len(endpoints))
        self._callers: list[PeerLink] = []
        self._dumps: dict[int, tuple[socket.socket, bytearray]] = {}
        self.links: dict[int, PeerLink] = {}
        self.dump: socket.socket | None = None

    # ------------------------------------------------------------------ connecting

    def connect(self) -> list[str]:
        """Connect to the peers of lower rank, and to the next rank for stacks; return what failed."""
        problems = []
        for rank in self._peers:
            if rank < self.own.rank:
                try:
                    self._add(PeerLink(rank, self._call(rank, "beats")))
                except OSError as error:
                    problems.append(
                        f"rank {rank} at {self.endpoints[rank].address}: {error.strerror or error}"
                    )
        with contextlib.suppress(OSError):
            self.dump = self._call((self.own.rank + 1) % len(self.endpoints), "stacks")
        return problems

    def _call(self, rank: int, purpose: str) -> socket.socket:
        endpoint = self.endpoints[rank]
        connection = socket.create_connection((endpoint.address, endpoint.port), timeout=CONNECT_SECONDS)
        connection.sendall(encode_frame({"hello": [self.own.rank, self._token, purpose]}))
        return connection

    def _add(self, link: PeerLink) -> None:
        link.socket.setblocking(False)
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = max(1, int(self._lost * 1000))
            link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self.links[link.rank] = link

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._callers.append(PeerLink(-1, connection))

    def _greet(self, caller: PeerLink) -> Iterator[tuple[int, dict[str, Any]]]:
        """Read a caller's hello, accept or close the connection, and yield messages that came with it."""
        messages, ended = [], False
        try:
            data = caller.socket.recv(_READ_NBYTES)
            messages, ended = list(caller.parser.feed(data)), not data
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, MalformedFrame):
            ended = True
        if messages and self._authenticate(caller, messages[0]):
            yield from ((caller.rank, message) for message in messages[1:] if caller.rank >= 0)
        elif messages or ended or time.monotonic() - caller.since > _HELLO_SECONDS:
            caller.socket.close()
        else:
            self._callers.append(caller)

    def _authenticate(self, caller: PeerLink, message: dict[str, Any]) -> bool:
        """Make a caller a link or a source of stack dumps if its hello is valid."""
        hello = message.get("hello")
        if not isinstance(hello, list) or len(hello) != 3:
            return False
        rank, token, purpose = hello
        valid = isinstance(rank, int) and 0 <= rank < len(self.endpoints) and isinstance(token, str)
        if not valid or not hmac.compare_digest(token.encode(errors="replace"), self._token.encode()):
            return False
        if purpose == "stacks":
            self._dumps[rank] = caller.socket, bytearray()
        elif purpose != "beats" or rank not in self._peers or rank in self.links:
            return False
        else:
            caller.rank = rank
            self._add(caller)
        return True

    def missing(self) -> list[int]:
        """Return the peers of higher rank that have not connected yet."""
        return [rank for rank in self._peers if rank > self.own.rank and rank not in self.links]

    # ------------------------------------------------------------------ receiving

    def wait(self, seconds: float, pidfds: list[int]) -> set[int]:
        """Sleep, but return at once when a connection or one of the processes `pidfds` ends, or a peer calls.

        Returns:
            Those of `pidfds` that have ended.
        """
        poll = select.poll()
        for link in self.links.values():
            if link.state == "open":
                poll.register(link.socket, getattr(select, "POLLRDHUP", 0))
        if self.missing():
            for each in (self._listener, *(caller.socket for caller in self._callers)):
                poll.register(each, select.POLLIN)
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        return {fd for fd, _ in poll.poll(seconds * 1e3)}.intersection(pidfds)

    def receive(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Accept callers, and yield all received messages with the ranks of their senders."""
        self._accept()
        callers, self._callers = self._callers, []
        for caller in callers:
            yield from self._greet(caller)
        for link in list(self.links.values()):
            yield from self._read(link)

    def _read(self, link: PeerLink) -> Iterator[tuple[int, dict[str, Any]]]:
        while link.state == "open":
            try:
                data = link.socket.recv(_READ_NBYTES)
                if not data:
                    self._end(link)
                for message in link.parser.feed(data):
                    yield link.rank, message
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(link, error)
            except MalformedFrame:
                self.reject(link.rank)

    def unanswered(self, rank: int) -> float:
        """Return the seconds since the host of a rank last acknowledged bytes; 0 where unknown."""
        link = self.links.get(rank)
        if link is None or link.state != "open" or not hasattr(socket, "TCP_INFO"):
            return 0.0
        info = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        return _TCP_INFO.unpack(info)[-1] / 1e3 if len(info) == _TCP_INFO.size else 0.0

    def reject(self, rank: int) -> None:
        """Close the connection with a rank that sent a malformed message."""
        if rank in self.links:
            self._end(self.links[rank])
            self.links[rank].state = "none"

    def _end(self, link: PeerLink, error: OSError | None = None) -> None:
        unreachable = error is not None and error.errno in _UNREACHABLE
        link.state, link.since = "lost" if unreachable else "closed", time.monotonic()
        link.socket.close()
        link.backlog.clear()

    def stack_dumps(self) -> Iterator[tuple[int, str]]:
        """Yield (rank, text) of ranks that wrote stacks without Python's lock."""
        for rank, (connection, data) in self._dumps.items():
            before = len(data)
            with contextlib.suppress(OSError):
                while more := connection.recv(_READ_NBYTES):
                    data += more
            if len(data) > before:
                yield rank, data.decode(errors="replace")
            if len(data) > _MAX_DUMP_NBYTES:
                data.clear()

    def discard_dump(self, rank: int) -> None:
        """Discard the stacks of a rank that runs again."""
        if rank in self._dumps:
            self._dumps[rank][1].clear()

    # ------------------------------------------------------------------ sending

    def send(self, message: dict[str, Any], *, to: int | None = None, droppable: bool = False) -> None:
        """Send to one rank, or to all peers; droppable messages are dropped where a peer does not read."""
        data = encode_frame(message)
        for link in self.links.values() if to is None else [self.links[to]] if to in self.links else []:
            if link.state != "open" or (droppable and len(link.backlog) >= _DROP_NBYTES):
                continue
            if len(link.backlog) + len(data) <= _MAX_BACKLOG_NBYTES:
                link.backlog += data
            self._flush(link)

    def flush(self) -> None:
        """Send what could not be sent before."""
        for link in self.links.values():
            if link.backlog and link.state == "open":
                self._flush(link)

    def _flush(self, link: PeerLink) -> None:
        try:
            sent = link.socket.send(link.backlog)
            del link.backlog[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):  # else earlier messages are read first
                self._end(link, error)

    # ------------------------------------------------------------------ closing

    def _sockets(self) -> list[socket.socket]:
        return [
            self._listener,
            *(link.socket for link in self.links.values()),
            *(connection for connection, _ in self._dumps.values()),
            *(caller.socket for caller in self._callers),
            *([self.dump] if self.dump else []),
        ]

    def close(self, *, forked: bool = False) -> None:
        """Close all connections after their last byte; in a forked child without shutting them down."""
        for each in self._sockets():
            if not forked:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_WR)
            each.close()
