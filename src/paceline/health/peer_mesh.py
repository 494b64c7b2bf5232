"""TCP connections between the watchdogs of all ranks.

TCP, not datagrams, since the kernel reports state without help of the process at the other end: the end of a connection
means that the process is gone (at once, whatever ended it), and unacknowledged bytes that its host is unreachable;
while a process that is stopped, or whose threads all wait for Python's lock, keeps a connection that acknowledges bytes
and sends nothing. Tracebacks arrive whole.

Both ends authenticate each other, and every frame carries a code; see `peer_handshake`. `aggregation/groups.py` says
which ranks are connected.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from paceline.health.heartbeat import FrameParser, MalformedFrame, encode_frame
from paceline.health.peer_endpoint import PeerEndpoint
from paceline.health.peer_handshake import FrameSealer
from paceline.health.pending_connections import (
    PROBE,
    AuthenticatedConnection,
    CallFailure,
    PendingConnections,
)

__all__ = ["PeerLink", "PeerMesh"]

_MAX_BACKLOG_NBYTES = 1 << 20  # unsent bytes per peer
_DROP_NBYTES = _MAX_BACKLOG_NBYTES // 16  # from which droppable messages are dropped
_READ_NBYTES = 1 << 16
_MAX_DUMP_NBYTES = 1 << 16
_TCP_INFO = struct.Struct("=8x48xI")  # ms since the last acknowledgement (struct tcp_info in linux/tcp.h)
_ENDED = getattr(select, "POLLRDHUP", 0)
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


@dataclass(eq=False)
class PeerLink:
    """A connection to a rank.

    Attributes:
        rank: its number.
        state: ``"open"``, ``"closed"`` (by the other end), ``"lost"`` (its host does not answer) or ``"none"`` (ended
            here after a malformed message).
        since: time of the latest change of `state`.
    """

    rank: int
    socket: socket.socket
    sealer: FrameSealer
    parser: FrameParser
    _: KW_ONLY
    state: str = "open"
    since: float = field(default_factory=time.monotonic)
    backlog: bytearray = field(default_factory=bytearray)


class PeerMesh:
    """The connections of this rank.

    Args:
        own: this rank's endpoint.
        endpoints: of all ranks.
        listener: the socket at the own endpoint.
        lost: seconds of unacknowledged bytes after which a host counts as unreachable.
        key: of the world.
        peers: ranks that are to be connected with this one from the start; the relation is symmetric.
        calls: those of them that this rank calls; the others call it.
        quiet: ranks whose messages do not end a wait, as they send many times per second.

    Attributes:
        links: connections by rank.
        dump: connection to the next rank, to which this process writes stacks without Python's lock; None: none.
    """

    def __init__(
        self,
        own: PeerEndpoint,
        endpoints: list[PeerEndpoint],
        listener: socket.socket,
        lost: float,
        *,
        key: bytes,
        peers: Collection[int],
        calls: Collection[int],
        quiet: Collection[int],
    ) -> None:
        self.own, self.endpoints = own, endpoints
        self._lost, self._peers, self._calls = lost, sorted(peers), sorted(calls)
        self._quiet = frozenset(quiet)
        self._pending = PendingConnections(key, own.rank, endpoints, listener)
        self._dumps: dict[int, tuple[socket.socket, bytearray]] = {}
        self.links: dict[int, PeerLink] = {}
        self._changes = 0
        self.dump: socket.socket | None = None

    @property
    def changes(self) -> int:
        """How often a connection was made or ended, or a call failed."""
        return self._changes + self._pending.ended_calls

    def now(self) -> float:
        """Return the time that `PeerLink.since` refers to."""
        return time.monotonic()

    # ------------------------------------------------------------------ connecting

    def connect(self) -> None:
        """Start to connect to the peers that this rank calls, and to the next rank for stacks."""
        for rank in self._calls:
            self.call(rank)
        self._pending.call(self._next_rank(), "stacks")

    def _next_rank(self) -> int:
        return (self.own.rank + 1) % len(self.endpoints)

    def awaits_dump(self) -> bool:
        """Return whether the connection for stacks is still being made."""
        return self.dump is None and self._pending.is_calling(self._next_rank(), "stacks")

    def call(self, rank: int) -> None:
        """Start to connect to a rank, unless this is under way or done."""
        link = self.links.get(rank)
        if link is None or link.state != "open":
            self._pending.call(rank, "beats")

    def probe(self, rank: int) -> None:
        """Start to find out whether the process of a rank still listens; if not, `call_failure` says so."""
        self._pending.call(rank, PROBE)

    def is_calling(self, rank: int) -> bool:
        """Return whether a call of a rank is under way."""
        return self._pending.is_calling(rank, "beats")

    def call_failure(self, rank: int) -> CallFailure | None:
        """Return how the latest call or probe of a rank failed; None: it did not."""
        return self._pending.failures.get(rank)

    def _add(self, found: AuthenticatedConnection) -> None:
        """Keep an authenticated connection; one of a rank that was connected before replaces the old one."""
        connection = found.socket
        if found.purpose == "stacks":
            if found.rank in self._dumps:
                self._dumps.pop(found.rank)[0].close()
            self._dumps[found.rank] = connection, bytearray()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = max(1, int(self._lost * 1000))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        if (old := self.links.get(found.rank)) is not None:
            old.socket.close()
        self._changes += 1
        self.links[found.rank] = PeerLink(found.rank, connection, found.sealer, found.parser)

    def _connect_pending(self) -> None:
        for found in self._pending.advance():
            if found.outgoing and found.purpose == "stacks":
                self.dump = found.socket
            else:
                self._add(found)

    def missing(self) -> dict[int, str]:
        """Return the peers that are not connected yet, each with what failed where that is known."""
        missing = [rank for rank in self._peers if rank not in self.links]
        failures = {rank: self._pending.failures.get(rank) for rank in missing}
        return {rank: "" if failure is None else failure.text for rank, failure in failures.items()}

    # ------------------------------------------------------------------ receiving

    def wait(self, seconds: float, pidfds: list[int]) -> set[int]:
        """Sleep; return early when a connection or one of the processes `pidfds` ends, or a peer not in `quiet` sends.

        Returns:
            Those of `pidfds` that have ended.
        """
        poll = select.poll()
        for link in self.links.values():
            if link.state == "open":
                data = 0 if link.rank in self._quiet else select.POLLIN
                poll.register(link.socket, data | _ENDED)
        for connection, events in self._pending.poll_events(callers=bool(self.missing())):
            poll.register(connection, events)
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        return {fd for fd, _ in poll.poll(seconds * 1e3)}.intersection(pidfds)

    def receive(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Accept callers, and yield all received messages with the ranks of their senders."""
        self._connect_pending()
        open_links = {link.socket.fileno(): link for link in self.links.values() if link.state == "open"}
        poll = select.poll()
        for fd in open_links:
            poll.register(fd, select.POLLIN | _ENDED)
        for fd, events in poll.poll(0):
            yield from self._read(open_links[fd], ended=bool(events & ~select.POLLIN))

    def _read(self, link: PeerLink, *, ended: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield what has arrived; if the connection has `ended`, up to its last byte."""
        while link.state == "open":
            try:
                data = link.socket.recv(_READ_NBYTES)
                if not data:
                    self._end(link)
                for message in link.parser.feed(data):
                    yield link.rank, message
                if not ended and len(data) < _READ_NBYTES:
                    return
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
        self._changes += 1
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

    def send(
        self,
        message: dict[str, Any],
        *,
        to: Collection[int] | None = None,
        besides: int | None = None,
        droppable: bool = False,
    ) -> None:
        """Send a message.

        Args:
            message: JSON.
            to: ranks; None: all that are connected.
            besides: rank that it is not sent to.
            droppable: it is dropped where a peer does not read.
        """
        data = encode_frame(message)
        for link in list(self.links.values()):
            if link.state != "open" or link.rank == besides or (to is not None and link.rank not in to):
                continue
            if len(link.backlog) + len(data) <= (_DROP_NBYTES if droppable else _MAX_BACKLOG_NBYTES):
                link.backlog += link.sealer.seal(data)
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
            *self._pending.sockets(),
            *(link.socket for link in self.links.values()),
            *(connection for connection, _ in self._dumps.values()),
            *([self.dump] if self.dump else []),
        ]

    def close(self, *, forked: bool = False) -> None:
        """Close all connections after their last byte; in a forked child without shutting them down."""
        for each in self._sockets():
            if not forked:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_WR)
            each.close()
