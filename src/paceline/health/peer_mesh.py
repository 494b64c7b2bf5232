"""Connections between the watchers of all ranks, or of enough of them.

Up to 16 ranks everybody is connected with everybody; above, with those at distances 1, 2, 4, … in both directions, and
what is new is passed on. Connections are TCP, not datagrams, for what the kernel tells by them without any help of the
process at the other end: their end says that the process is gone (at once, whatever ended it), and bytes that nobody
acknowledges say that its host is out of reach; while a process that is stopped, or whose threads all wait for Python's
lock, keeps a connection on which bytes are acknowledged and nothing comes. A traceback arrives whole.

The higher rank dials the lower one and shows a token that only the ranks of this world have been told.

Where the watcher of a rank is reached by those of other ranks.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline._core.network_interfaces import host_address, is_loopback, list_interfaces
from paceline.health.heartbeat import FrameParser, MalformedFrame, pack

__all__ = ["MeshCard", "PeerLink", "PeerMesh", "listen", "mesh_peers", "own_address"]

FULL_MESH = 16
"""Ranks up to which everybody is connected with everybody."""


_HELLO_SECONDS = 10.0  # for a caller to say who it is


_DIAL_SECONDS = 5.0


_MOST_WAITING_NBYTES = 1 << 20  # of bytes that a peer does not take: rows are left out then


_READ_NBYTES = 1 << 16


_MOST_DUMP_NBYTES = 1 << 16


_TCP_INFO = struct.Struct("=8x48xI")  # ms since the last acknowledgement (struct tcp_info in linux/tcp.h)


_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


def mesh_peers(rank: int, ranks: int) -> list[int]:
    """Return the ranks that `rank` is connected with; who is connected with whom is mutual.

    Example:
        >>> mesh_peers(0, 4), mesh_peers(0, 20)
        ([1, 2, 3], [1, 2, 4, 8, 12, 16, 18, 19])
    """
    if ranks <= FULL_MESH:
        return [other for other in range(ranks) if other != rank]
    distances = [1 << power for power in range(ranks.bit_length()) if 1 << power < ranks]
    found = {(rank + sign * distance) % ranks for distance in distances for sign in (1, -1)}
    return sorted(found - {rank})


@dataclass(frozen=True)
class MeshCard:
    """What a rank tells the others of itself before it is watched.

    Attributes:
        rank: who. host: its host's name. key: what it has in common with the processes of its host.
        pid, start: its process. ident: the thread that trains.
        address, port: where its watcher is dialled. token: rank 0's is that of all.
    """

    rank: int
    host: str
    key: str
    pid: int
    start: int
    ident: int
    address: str
    port: int
    token: str


@dataclass(eq=False)
class PeerLink:
    """A connection to a rank.

    Attributes:
        state: ``"open"``, ``"closed"`` (its end is gone) or ``"lost"`` (its host does not answer); and `since` when.
    """

    rank: int
    socket: socket.socket
    state: str = "open"
    since: float = 0.0
    inbox: FrameParser = field(default_factory=FrameParser)
    early: list[dict[str, Any]] = field(default_factory=list)  # what came with the greeting
    outgoing: bytearray = field(default_factory=bytearray)


class PeerMesh:
    """The connections of this rank.

    Args:
        me: its card. cards: of all ranks. listener: where it is dialled.
        lost: seconds after which bytes that nobody acknowledges mean that a host is out of reach.
    """

    def __init__(self, me: MeshCard, cards: list[MeshCard], listener: socket.socket, lost: float) -> None:
        self.me, self.cards = me, cards
        self._listener, self._lost = listener, lost
        self._token = cards[0].token
        self._callers: list[tuple[socket.socket, FrameParser, float]] = []
        self._dumps: list[tuple[int, socket.socket, bytearray]] = []
        self.links: dict[int, PeerLink] = {}
        self.dump: socket.socket | None = None
        """Where this process may write its stacks without Python's lock: the next rank reads it."""

    def dial(self) -> list[str]:
        """Connect with the neighbours of lower rank, and with the next rank for stacks; return what went wrong."""
        problems = []
        for rank in mesh_peers(self.me.rank, len(self.cards)):
            if rank < self.me.rank:
                try:
                    self._keep(rank, self._call(rank, "beats"))
                except OSError as error:
                    problems.append(f"rank {rank} at {self.cards[rank].address}: {error.strerror or error}")
        with contextlib.suppress(OSError):
            self.dump = self._call((self.me.rank + 1) % len(self.cards), "stacks")
        return problems

    def _call(self, rank: int, purpose: str) -> socket.socket:
        card = self.cards[rank]
        caller = socket.create_connection((card.address, card.port), timeout=_DIAL_SECONDS)
        caller.sendall(pack({"hello": [self.me.rank, self._token, purpose]}))
        return caller

    def _keep(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = max(1, int(self._lost * 1000))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self.links[rank] = PeerLink(rank, connection)

    # ------------------------------------------------------------------ what comes

    def rest(self, seconds: float, others: list[int]) -> set[int]:
        """Sleep, but wake at once where a connection or one of the processes `others` (pidfds) ends.

        Returns:
            Those of `others` that have ended.
        """
        poll = select.poll()
        ends = getattr(select, "POLLRDHUP", 0)
        for link in self.links.values():
            if link.state == "open":
                poll.register(link.socket, ends)
        for pidfd in others:
            poll.register(pidfd, select.POLLIN)
        return {fd for fd, _ in poll.poll(seconds * 1e3)}.intersection(others)

    def receive(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Take in everything that has come, and yield it with the rank that it came from."""
        self._answer()
        for link in list(self.links.values()):
            early, link.early = link.early, []
            yield from ((link.rank, message) for message in early)
            if link.state == "open":
                yield from self._read(link)

    def _read(self, link: PeerLink) -> Iterator[tuple[int, dict[str, Any]]]:
        while link.state == "open":
            try:
                data = link.socket.recv(_READ_NBYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(link, error)
                return
            if not data:
                self._end(link, None)
            try:
                for message in link.inbox.feed(data):
                    yield link.rank, message
            except MalformedFrame as error:
                self._end(link, OSError(errno.EBADMSG, str(error)))

    def unanswered(self, rank: int) -> float:
        """Return the seconds since the host of a rank acknowledged anything; 0 where that can't be told."""
        link = self.links.get(rank)
        if link is None or link.state != "open" or not hasattr(socket, "TCP_INFO"):
            return 0.0
        info = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        return _TCP_INFO.unpack(info)[-1] / 1e3 if len(info) == _TCP_INFO.size else 0.0

    def refuse(self, rank: int) -> None:
        """End the connection with a rank that told nonsense."""
        if rank in self.links:
            self._end(self.links[rank], OSError(errno.EBADMSG, "nonsense"))

    def _end(self, link: PeerLink, error: OSError | None) -> None:
        bad = error is not None and error.errno == errno.EBADMSG
        lost = error is not None and error.errno in _UNREACHABLE
        link.state, link.since = "none" if bad else "lost" if lost else "closed", time.monotonic()
        link.socket.close()
        link.outgoing.clear()

    def _answer(self) -> None:
        """Let in callers that say who they are and know the token."""
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                break
            caller.setblocking(False)
            self._callers.append((caller, FrameParser(), time.monotonic()))
        waiting, self._callers = self._callers, []
        for caller, inbox, since in waiting:
            try:
                data = caller.recv(4096)
                messages = list(inbox.feed(data))
            except (BlockingIOError, InterruptedError):
                data, messages = b"?", []
            except (OSError, MalformedFrame):
                data, messages = b"", []
            if messages and self._welcome(caller, messages, inbox):
                continue
            if messages or not data or time.monotonic() - since > _HELLO_SECONDS:
                caller.close()
            else:
                self._callers.append((caller, inbox, since))

    def _welcome(self, caller: socket.socket, messages: list[dict[str, Any]], inbox: FrameParser) -> bool:
        hello = messages[0].get("hello")
        if not isinstance(hello, list) or len(hello) != 3:
            return False
        rank, token, purpose = hello
        known = isinstance(rank, int) and 0 <= rank < len(self.cards) and isinstance(token, str)
        if not known or not hmac.compare_digest(token.encode(errors="replace"), self._token.encode()):
            return False
        if purpose == "stacks":
            self._dumps.append((rank, caller, bytearray()))
            return True
        if purpose != "beats" or rank not in mesh_peers(self.me.rank, len(self.cards)) or rank in self.links:
            return False
        self._keep(rank, caller)
        self.links[rank].inbox, self.links[rank].early = inbox, messages[1:]
        return True

    def dumps(self) -> Iterator[tuple[int, str]]:
        """Yield (rank, what it wrote) of ranks that told their stacks from outside Python's lock."""
        for rank, connection, data in self._dumps:
            before = len(data)
            with contextlib.suppress(OSError):
                while more := connection.recv(_READ_NBYTES):
                    data += more
            if len(data) > before:
                yield rank, data.decode(errors="replace")
            if len(data) > _MOST_DUMP_NBYTES:
                data.clear()

    def forget_dump(self, rank: int) -> None:
        """Drop what a rank wrote, once it runs again."""
        for other, _, data in self._dumps:
            if other == rank:
                data.clear()

    # ------------------------------------------------------------------ what goes

    def send(self, message: dict[str, Any], *, to: int | None = None, vital: bool = True) -> None:
        """Send to one rank, or to all neighbours; what is not vital is left out where a peer takes nothing."""
        data = pack(message)
        for link in self.links.values() if to is None else [self.links[to]] if to in self.links else []:
            if link.state == "open" and (vital or len(link.outgoing) < _MOST_WAITING_NBYTES // 16):
                if len(link.outgoing) + len(data) <= _MOST_WAITING_NBYTES:
                    link.outgoing += data
                self._push(link)

    def push(self) -> None:
        """Send what could not be sent before."""
        for link in self.links.values():
            if link.outgoing and link.state == "open":
                self._push(link)

    def _push(self, link: PeerLink) -> None:
        try:
            sent = link.socket.send(link.outgoing)
            del link.outgoing[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                self._end(link, error)  # of the others, what came before the end is read first

    def files(self) -> set[int]:
        """Return the descriptors of all sockets."""
        held = [self._listener, *(link.socket for link in self.links.values() if link.state == "open")]
        held += [connection for _, connection, _ in self._dumps] + [caller for caller, _, _ in self._callers]
        return {each.fileno() for each in [*held, *([self.dump] if self.dump else [])]}

    def close(self, *, forked: bool = False) -> None:
        """Close all connections: after the last byte, or in a forked child without touching them."""
        for each in [
            self._listener,
            *(link.socket for link in self.links.values()),
            *(connection for _, connection, _ in self._dumps),
            *(caller for caller, _, _ in self._callers),
            *([self.dump] if self.dump else []),
        ]:
            if not forked:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_WR)
            each.close()


LOOPBACK = "127.0.0.1"


def own_address(env: Mapping[str, str] | None = None) -> str:
    """Return the address at which other hosts reach this one: that of the process group, as far as it can be told.

    It is that of the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names; else what this host's name resolves
    to, as for gloo; else the one from which rank 0's host is reached.
    """
    env = os.environ if env is None else env
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        named = env.get(variable, "").split(",")[0]
        for interface in list_interfaces() if named else ():
            if interface.name == named:
                return min(interface.addresses, key=lambda address: ":" in address)
    address = host_address()
    if address and not is_loopback(address):
        return address
    return _towards(env.get("MASTER_ADDR", "")) or LOOPBACK


def _towards(host: str) -> str:
    """Return the address of this host from which `host` is reached, empty if it is not, or is this one."""
    if not host:
        return ""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if is_loopback(address) else address


def listen(address: str) -> socket.socket:
    """Return a socket that is dialled at `address`, at a port that is free.

    Raises:
        OSError: this host has no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
