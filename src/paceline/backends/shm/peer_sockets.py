"""Connections between the ranks of a host: they pass file descriptors and detect the end of a process.

Every two ranks of a group on a host hold a Unix socket between them. Descriptors of shared memory travel over it, and
its end of file reports at once that the other process ended. A pidfd of the process reports the end even while a
child still holds the socket, and its exit code afterwards. A rank that leaves the group says goodbye first; a process
that ends does not.

    rank 0 ── rank 1        the higher rank connects to the lower one, at an address that only this host can
        ╲     ╱             reach, with a token that only the group's store knows
         rank 2
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline._core.processes.process_exit import ExitStatus, exit_status_of, has_ended
from paceline.backends.shm.shared_arena import Segment
from paceline.errors import CollectiveTimeout

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["HostPeers", "PeerInfo", "PeerListener", "SharedMemoryUnavailable", "exchange_peer_info"]

_HELLO = struct.Struct("<i16s")  # rank of the caller, token of the listener
_CREDENTIALS = struct.Struct("<iII")  # pid, uid, gid (unix(7))
_MESSAGE = struct.Struct("<cq")  # kind, number of a descriptor
_FD, _GOODBYE = b"F", b"G"
_GROUP_SEGMENT = -1  # number of the descriptor of the segment that all ranks share
_POLL_SECONDS = 0.2
_HELLO_SECONDS = 5.0


class SharedMemoryUnavailable(Exception):
    """The ranks of a host can't share memory; the text is the reason, empty if another rank knows it."""


@dataclass(frozen=True, kw_only=True)
class PeerInfo:
    """Description of a rank, published to the others of its group.

    Attributes:
        rank: in the group.
        world_rank: in the world.
        host: identity of its host.
        name: name of its host, for people.
        pid: its process.
        address: where it listens.
        token: secret that a caller must send.
        problem: why it has no shared memory; empty if it has.
    """

    rank: int
    world_rank: int
    host: str
    name: str
    pid: int
    address: str
    token: str
    problem: str = ""


def exchange_peer_info(store: Store, me: PeerInfo, size: int, timeout: float) -> list[PeerInfo]:
    """Publish `me` to all ranks of the group and return those of all ranks, by rank; blocks.

    Raises:
        CollectiveTimeout: ranks are missing after `timeout` seconds.
    """
    store.set(f"card/{me.rank}", json.dumps(asdict(me)))
    return [PeerInfo(**json.loads(text)) for text in _read_all(store, "card", size, timeout)]


def _read_all(store: Store, key: str, size: int, seconds: float) -> list[str]:
    """Return the values that all ranks wrote under their own keys; blocks."""
    keys = [f"{key}/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        missing = [rank for rank in range(size) if not store.check([keys[rank]])]
        if not missing:
            raise
        names = ", ".join(f"rank {rank}" for rank in missing)
        raise CollectiveTimeout(
            f"{names} of {size} did not join the group within {seconds:g} s", rank=missing[0]
        ) from error
    return [store.get(each).decode() for each in keys]


class PeerListener:
    """Socket to which the higher ranks of the host connect. On Linux its address is abstract and leaves no file."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.address = f"paceline-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(1024)
        self._socket.settimeout(_POLL_SECONDS)

    def accept(self) -> tuple[int, socket.socket] | None:
        """Return rank and connection of the next caller that knows the token; None: none called for a while."""
        try:
            caller, _ = self._socket.accept()
        except TimeoutError:
            return None
        try:
            caller.settimeout(_HELLO_SECONDS)
            rank, token = _HELLO.unpack(_receive_exactly(caller, _HELLO.size))
            if secrets.compare_digest(token.hex(), self.token) and _credentials(caller)[1] == os.getuid():
                return rank, caller
        except OSError:
            pass  # it closed the connection, or sent nothing
        caller.close()
        return None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


@dataclass(eq=False)
class _Connection:
    peer: PeerInfo
    socket: socket.socket
    pid: int
    pidfd: int
    said_goodbye: bool = False

    def close(self) -> None:
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class HostPeers:
    """Connections of this rank to the other ranks of its group on this host.

    Args:
        me: this rank.
        local: the ranks of this host, `me` included.
        group: all ranks of the group.
        listener: where the higher ranks of this host connect; None: `me` has a problem.
        store: of the group.
        timeout: seconds to wait for all connections.
        nbytes: size of the segment that the ranks of this host share.

    Attributes:
        segment: that segment, all zero.

    Raises:
        SharedMemoryUnavailable: ranks of some host can't share memory; every rank of the group raises it.
    """

    segment: Segment

    def __init__(
        self,
        me: PeerInfo,
        local: Sequence[PeerInfo],
        group: Sequence[PeerInfo],
        *,
        listener: PeerListener | None,
        store: Store,
        timeout: float,
        nbytes: int,
    ) -> None:
        self.me, self.peers = me, list(local)
        self._connections: dict[int, _Connection] = {}
        self._received_fds: dict[tuple[int, int], int | None] = {}
        self._reading = threading.Lock()
        problem = next((f"rank {peer.rank}: {peer.problem}" for peer in group if peer.problem), "")
        deadline = time.monotonic() + timeout
        try:
            if listener is not None and not problem:
                try:
                    self._connect(listener, store, deadline)
                    self.segment = self._share_segment(nbytes, store, deadline)
                except (OSError, SharedMemoryUnavailable) as error:
                    problem = f"rank {me.rank}: {error}" if str(error) else "no"
            self._agree(store, problem, len(group), timeout)
        except BaseException:
            self.disconnect()
            raise
        finally:
            if listener is not None:
                listener.close()

    def _connect(self, listener: PeerListener, store: Store, deadline: float) -> None:
        for peer in self.peers:
            if peer.rank < self.me.rank:
                self._connections[peer.rank] = self._dial(peer)
        missing = {peer.rank: peer for peer in self.peers if peer.rank > self.me.rank}
        while missing:
            accepted = listener.accept()
            if accepted is not None and accepted[0] in missing:
                rank, caller = accepted
                self._connections[rank] = _connection(missing.pop(rank), caller)
            elif accepted is not None:
                accepted[1].close()
            elif any(store.check([f"shared/{rank}"]) for rank in missing):
                raise SharedMemoryUnavailable
            elif time.monotonic() > deadline:
                raise SharedMemoryUnavailable(f"ranks {sorted(missing)} did not connect in time")

    def _dial(self, peer: PeerInfo) -> _Connection:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            caller.connect(f"\0{peer.address}")
            if _credentials(caller)[1] != os.getuid():
                raise SharedMemoryUnavailable(f"rank {peer.rank} belongs to another user")
            caller.sendall(_HELLO.pack(self.me.rank, bytes.fromhex(peer.token)))
        except BaseException as error:
            caller.close()
            if isinstance(error, ConnectionRefusedError):
                raise SharedMemoryUnavailable(
                    f"rank {peer.rank} can't be reached by a Unix socket (another network namespace?)"
                ) from None
            raise
        return _connection(peer, caller)

    def _share_segment(self, nbytes: int, store: Store, deadline: float) -> Segment:
        """Create the segment on the first rank of the host and pass it to the others."""
        first, *others = (peer.rank for peer in self.peers)
        if self.me.rank == first:
            segment = Segment.create(nbytes)
            for rank in others:
                if not self.send_fd(rank, _GROUP_SEGMENT, segment.fd):
                    raise SharedMemoryUnavailable(f"rank {rank} accepted no descriptor")
            return segment
        watch = select.poll()
        watch.register(self._connections[first].socket, select.POLLIN)
        while True:
            over = store.check([f"shared/{first}"])  # checked first: what it sent before has arrived then
            if (fd := self.receive_fd(first, _GROUP_SEGMENT)) is not None:
                return Segment.from_fd(fd)
            if over or self._is_gone(self._connections[first]):
                raise SharedMemoryUnavailable
            if time.monotonic() > deadline:
                raise SharedMemoryUnavailable(f"rank {first} shared no memory in time")
            watch.poll(_POLL_SECONDS * 1e3)

    def _agree(self, store: Store, problem: str, size: int, timeout: float) -> None:
        """Raise on all ranks of the group if one of them has a problem."""
        store.set(f"shared/{self.me.rank}", problem or "yes")
        answers = _read_all(store, "shared", size, timeout)
        if any(answer != "yes" for answer in answers):
            reasons = [answer for answer in answers if answer not in ("yes", "no")]
            raise SharedMemoryUnavailable(
                reasons[0] if reasons else "a rank ended while the group was created"
            )

    def send_fd(self, rank: int, number: int, fd: int) -> bool:
        """Send a descriptor to `rank` under a number of this rank; return whether that was possible now."""
        try:
            socket.send_fds(self._connections[rank].socket, [_MESSAGE.pack(_FD, number)], [fd])
        except OSError:
            return False  # too many are queued, or the peer has ended, which others detect
        return True

    def receive_fd(self, rank: int, number: int) -> int | None:
        """Return the descriptor that `rank` sent under `number`; None: it has not arrived.

        Raises:
            OSError: it arrived, but this process may open no more files.
        """
        self._is_gone(self._connections[rank])
        with self._reading:
            if (rank, number) not in self._received_fds:
                return None
            fd = self._received_fds.pop((rank, number))
        if fd is None:
            raise OSError(
                errno.EMFILE, f"no descriptor left for memory of rank {rank}: raise the limit (ulimit -n)"
            )
        return fd

    def gone(self) -> list[tuple[PeerInfo, bool]]:
        """Return the peers that are gone, and whether each said goodbye."""
        return [(each.peer, each.said_goodbye) for each in self._connections.values() if self._is_gone(each)]

    def exit_status(self, rank: int) -> ExitStatus:
        """Return how the process of `rank` ended, waiting a moment for its end to complete."""
        connection = self._connections[rank]
        return exit_status_of(connection.pidfd, connection.pid)

    def is_stopped(self, rank: int) -> bool:
        """Return whether the process of `rank` is stopped (SIGSTOP, a debugger)."""
        try:
            with open(f"/proc/{self._connections[rank].pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    def close(self) -> None:
        """Say goodbye to all peers. During interpreter shutdown the process just ends, so they learn its exit code."""
        if not threading.main_thread().is_alive():
            for connection in self._connections.values():
                connection.socket.detach()  # else Python closes it long before the process has an exit code
            return
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.socket.send(_MESSAGE.pack(_GOODBYE, 0))
        self.disconnect()

    def disconnect(self) -> None:
        """Close all connections without a goodbye."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        for fd in self._received_fds.values():
            if fd is not None:
                os.close(fd)
        self._received_fds.clear()

    def _is_gone(self, connection: _Connection) -> bool:
        """Read what a peer sent, and return whether it is gone."""
        over = has_ended(connection.pidfd)  # checked first: what it sent before has arrived then
        with self._reading:
            return self._read(connection) or over

    def _read(self, connection: _Connection) -> bool:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(connection.socket, _MESSAGE.size, 1)
            except BlockingIOError:
                return connection.said_goodbye
            except OSError:
                return True
            if not data:
                return True
            kind, number = _MESSAGE.unpack(data)
            if kind == _GOODBYE:
                connection.said_goodbye = True
            else:
                self._received_fds[connection.peer.rank, number] = fds[0] if fds else None


def _connection(peer: PeerInfo, connected: socket.socket) -> _Connection:
    connected.setblocking(False)
    pid, pidfd = _credentials(connected)[0], -1
    with contextlib.suppress(OSError, AttributeError):  # without a pidfd the exit code stays unknown
        pidfd = os.pidfd_open(pid)
    return _Connection(peer, connected, pid, pidfd)


def _receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise ConnectionError("the caller closed the connection")
        data += more
    return data


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    if sys.platform != "linux":
        return -1, os.getuid()
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
