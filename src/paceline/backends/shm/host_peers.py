"""The other ranks of this host: who they are, what descriptors they hand over, and whether they live.

Every two ranks of a group on a host hold a Unix socket between them. Descriptors of shared memory travel
over it; its end of file tells that the other process ended, at once and without anybody's help. The
process itself is held by a pidfd: that tells the end even while a child still holds the socket, and its exit
code after the fact. Who leaves says so first; a process that ends just ends.

    rank 0 ── rank 1        the higher rank dials the lower one, at an address that only this host can
        ╲     ╱             reach and whose token only the group's store knows
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

from paceline._core.process_exit import ExitStatus, exit_status_of, has_ended
from paceline.backends.shm.shared_arena import Segment
from paceline.errors import CollectiveTimeout

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["HostPeers", "MemoryNotShared", "PeerCard", "exchange_cards"]

_HELLO = struct.Struct("<i16s")  # rank, token of the one that is dialled
_CREDENTIALS = struct.Struct("<iII")  # pid, uid, gid (unix(7))
_PARCEL = struct.Struct("<cq")  # kind, number
_FD, _GOODBYE = b"F", b"G"
_COMMON = -1  # the number of the memory that all share from the start
_LOOK_SECONDS = 0.2


class MemoryNotShared(Exception):
    """Shared memory can't be had between the ranks of this host; the text says why, or nothing if others know."""


@dataclass(frozen=True)
class PeerCard:
    """What a rank tells the others of its group about itself.

    Attributes:
        rank: in the group. world_rank: in the world.
        host: what ranks of one host have in common; name: what people call that host.
        pid: its process. address: where it is dialled. token: what a caller must know.
        problem: why it has no shared memory, empty if it has.
    """

    rank: int
    world_rank: int
    host: str
    name: str
    pid: int
    address: str
    token: str
    problem: str = ""


def exchange_cards(store: Store, mine: PeerCard, size: int, timeout: float) -> list[PeerCard]:
    """Tell `mine` to all ranks of the group and return everybody's, by rank; blocks.

    Raises:
        CollectiveTimeout: ranks did not come within `timeout` seconds.
    """
    store.set(f"card/{mine.rank}", json.dumps(asdict(mine)))
    found = _everybodys(store, "card", size, timeout)
    return [PeerCard(**json.loads(text)) for text in found]


def _everybodys(store: Store, key: str, size: int, seconds: float) -> list[str]:
    """Return what all ranks wrote under a key of their own; blocks."""
    keys = [f"{key}/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        missing = [rank for rank in range(size) if not store.check([keys[rank]])]
        if not missing:
            raise
        names = ", ".join(f"rank {rank}" for rank in missing)
        raise CollectiveTimeout(
            f"{names} of {size} did not come within {seconds:g} s to make the group", rank=missing[0]
        ) from error
    return [store.get(each).decode() for each in keys]


class PeerListener:
    """Where this rank is dialled. On Linux the address is abstract: it leaves no file behind."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.address = f"paceline-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(1024)
        self._socket.settimeout(_LOOK_SECONDS)

    def answer(self) -> tuple[int, socket.socket] | None:
        """Return the next caller that knows the token, None if nobody called for a while."""
        try:
            caller, _ = self._socket.accept()
        except TimeoutError:
            return None
        try:
            caller.settimeout(5.0)
            rank, token = _HELLO.unpack(_receive_exactly(caller, _HELLO.size))
            if secrets.compare_digest(token.hex(), self.token) and _credentials(caller)[1] == os.getuid():
                return rank, caller
        except OSError:
            pass  # it hung up, or said nothing
        caller.close()
        return None

    def close(self) -> None:
        """Stop being dialled."""
        self._socket.close()


@dataclass(eq=False)
class _Neighbour:
    card: PeerCard
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
        me: this rank's card. cards: those of the whole group. here: those of this host, me included.
        listener: where the higher ranks of this host dial this one; None: `me` has a problem.
        store: the group's. timeout: seconds to wait for all connections.
        nbytes: size of the memory that the ranks of this host share from the start.

    Attributes:
        common: that memory, all zero.

    Raises:
        NotShared: ranks of some host can't reach each other; every rank of the group raises it.
    """

    common: Segment

    def __init__(
        self,
        me: PeerCard,
        cards: Sequence[PeerCard],
        here: Sequence[PeerCard],
        listener: PeerListener | None,
        store: Store,
        timeout: float,
        nbytes: int,
    ) -> None:
        self.me, self.cards = me, list(here)
        self._by_rank: dict[int, _Neighbour] = {}
        self._parcels: dict[tuple[int, int], int | None] = {}
        self._reading = threading.Lock()
        problem = next((f"rank {card.rank}: {card.problem}" for card in cards if card.problem), "")
        deadline = time.monotonic() + timeout
        try:
            if listener is not None and not problem:
                try:
                    self._meet(listener, store, deadline)
                    self.common = self._share(nbytes, store, deadline)
                except (OSError, MemoryNotShared) as error:
                    problem = f"rank {me.rank}: {error}" if str(error) else "no"
            self._vote(store, problem, len(cards), timeout)
        except BaseException:
            self.forsake()
            raise
        finally:
            if listener is not None:
                listener.close()

    def _meet(self, listener: PeerListener, store: Store, deadline: float) -> None:
        for card in self.cards:
            if card.rank < self.me.rank:
                self._by_rank[card.rank] = self._dial(card)
        missing = {card.rank: card for card in self.cards if card.rank > self.me.rank}
        while missing:
            answered = listener.answer()
            if answered is not None and answered[0] in missing:
                rank, caller = answered
                self._by_rank[rank] = self._known(missing.pop(rank), caller)
            elif answered is not None:
                answered[1].close()
            elif any(store.check([f"shared/{rank}"]) for rank in missing):
                raise MemoryNotShared
            elif time.monotonic() > deadline:
                raise MemoryNotShared(f"ranks {sorted(missing)} did not connect in time")

    def _share(self, nbytes: int, store: Store, deadline: float) -> Segment:
        """Have the first rank of the host make memory and hand it to the others."""
        first, *others = (card.rank for card in self.cards)
        if self.me.rank == first:
            common = Segment.new(nbytes)
            for rank in others:
                if not self.send_fd(rank, _COMMON, common.fd):
                    raise MemoryNotShared(f"rank {rank} took no descriptor")
            return common
        watch = select.poll()
        watch.register(self._by_rank[first].socket, select.POLLIN)
        while True:
            over = store.check([f"shared/{first}"])  # asked first: what it sent is there then
            if (fd := self.take_fd(first, _COMMON)) is not None:
                return Segment.of(fd)
            if over or self._gone(self._by_rank[first]):
                raise MemoryNotShared
            if time.monotonic() > deadline:
                raise MemoryNotShared(f"rank {first} shared no memory in time")
            watch.poll(_LOOK_SECONDS * 1e3)

    def _dial(self, card: PeerCard) -> _Neighbour:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            caller.connect(f"\0{card.address}")
            if _credentials(caller)[1] != os.getuid():
                raise MemoryNotShared(f"rank {card.rank} belongs to another user")
            caller.sendall(_HELLO.pack(self.me.rank, bytes.fromhex(card.token)))
        except ConnectionRefusedError:
            caller.close()
            raise MemoryNotShared(
                f"rank {card.rank} can't be reached by a Unix socket (another network namespace?)"
            ) from None
        except BaseException:
            caller.close()
            raise
        return self._known(card, caller)

    def _known(self, card: PeerCard, connection: socket.socket) -> _Neighbour:
        connection.setblocking(False)
        pid, pidfd = _credentials(connection)[0], -1
        with contextlib.suppress(OSError, AttributeError):  # no pidfd: its exit code stays unknown
            pidfd = os.pidfd_open(pid)
        return _Neighbour(card, connection, pid, pidfd)

    def _vote(self, store: Store, problem: str, size: int, timeout: float) -> None:
        """Have all ranks of the group come to the same end."""
        store.set(f"shared/{self.me.rank}", problem or "yes")
        votes = _everybodys(store, "shared", size, timeout)
        if any(vote != "yes" for vote in votes):
            reasons = [vote for vote in votes if vote not in ("yes", "no")]
            raise MemoryNotShared(reasons[0] if reasons else "a rank ended while the group was made")

    def send_fd(self, rank: int, number: int, fd: int) -> bool:
        """Hand a descriptor to `rank`, under a number of our own; return whether that was possible just now."""
        try:
            socket.send_fds(self._by_rank[rank].socket, [_PARCEL.pack(_FD, number)], [fd])
        except OSError:
            return False  # too many under way, or it has ended: whoever waits for it will say so
        return True

    def take_fd(self, rank: int, number: int) -> int | None:
        """Return the descriptor that `rank` sent under `number`; None: it did not come (yet).

        Raises:
            OSError: it came, but this process may open no more files.
        """
        self._gone(self._by_rank[rank])
        with self._reading:
            if (rank, number) not in self._parcels:
                return None
            fd = self._parcels.pop((rank, number))
        if fd is None:
            raise OSError(
                errno.EMFILE, f"no descriptor left for memory of rank {rank}: raise the limit (ulimit -n)"
            )
        return fd

    def ended(self) -> list[tuple[PeerCard, bool]]:
        """Return the neighbours that are gone, and whether each took its leave."""
        return [(each.card, each.said_goodbye) for each in self._by_rank.values() if self._gone(each)]

    def exit_of(self, rank: int) -> ExitStatus:
        """Return how the process of `rank` ended, waiting a moment for it to be through with that."""
        neighbour = self._by_rank[rank]
        return exit_status_of(neighbour.pidfd, neighbour.pid)

    def stopped(self, rank: int) -> bool:
        """Tell whether the process of `rank` is stopped (SIGSTOP, a debugger)."""
        try:
            with open(f"/proc/{self._by_rank[rank].pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    def close(self) -> None:
        """Take leave of everybody. Where Python goes down it just ends, and its exit code tells the rest."""
        if not threading.main_thread().is_alive():
            for neighbour in self._by_rank.values():
                neighbour.socket.detach()  # else Python closes it long before the process has an exit code
            return
        for neighbour in self._by_rank.values():
            with contextlib.suppress(OSError):
                neighbour.socket.send(_PARCEL.pack(_GOODBYE, 0))
        self.forsake()

    def forsake(self) -> None:
        """Close all connections without a word."""
        for neighbour in self._by_rank.values():
            neighbour.close()
        self._by_rank.clear()
        for fd in self._parcels.values():
            if fd is not None:
                os.close(fd)
        self._parcels.clear()

    def _gone(self, neighbour: _Neighbour) -> bool:
        """Take in what a neighbour sent, and return whether it is gone."""
        over = has_ended(neighbour.pidfd)  # asked first: all that it sent is there then
        with self._reading:
            return self._read(neighbour) or over

    def _read(self, neighbour: _Neighbour) -> bool:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(neighbour.socket, _PARCEL.size, 1)
            except BlockingIOError:
                return neighbour.said_goodbye
            except OSError:
                return True
            if not data:
                return True
            kind, number = _PARCEL.unpack(data)
            if kind == _GOODBYE:
                neighbour.said_goodbye = True
            else:
                self._parcels[neighbour.card.rank, number] = fds[0] if fds else None


def _receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise ConnectionError("the caller hung up")
        data += more
    return data


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    if sys.platform != "linux":
        return -1, os.getuid()
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
