"""The other ranks of this host: who they are, what descriptors they hand over, and whether they live.

Every two ranks of a group on a host hold a Unix socket between them. Descriptors of shared memory travel
over it; its end of file tells that the other process ended, at once and without anybody's help. The
process itself is held by a pidfd, so that its exit code can be read after the fact.

    rank 0 ── rank 1        the higher rank dials the lower one, at an address that only this host can
        ╲     ╱             reach and whose token only the group's store knows
         rank 2
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.backends.exits import Exit, exit_of

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Card", "Neighbours", "NotShared", "exchange_cards"]

_HELLO = struct.Struct("<i16s")  # rank, token of the one that is dialled
_CREDENTIALS = struct.Struct("<iII")  # pid, uid, gid (unix(7))
_PARCEL = struct.Struct("<cq")  # kind, number
_FD, _GOODBYE = b"F", b"G"
_LOOK_SECONDS = 0.2


class NotShared(Exception):
    """Shared memory can't be had between the ranks of this host; the text says why."""


@dataclass(frozen=True)
class Card:
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


def exchange_cards(store: Store, mine: Card, size: int) -> list[Card]:
    """Tell `mine` to all ranks of the group and return everybody's, by rank; blocks."""
    store.set(f"card/{mine.rank}", json.dumps(asdict(mine)))
    found = [store.get(f"card/{rank}") for rank in range(size)]
    return [Card(**json.loads(text)) for text in found]


class Listener:
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
        caller.settimeout(5.0)
        try:
            rank, token = _HELLO.unpack(_receive_exactly(caller, _HELLO.size))
        except OSError:
            caller.close()
            return None
        if not secrets.compare_digest(token.hex(), self.token) or _credentials(caller)[1] != os.getuid():
            caller.close()
            return None
        return rank, caller

    def close(self) -> None:
        """Stop being dialled."""
        self._socket.close()


@dataclass(eq=False)
class _Neighbour:
    card: Card
    socket: socket.socket
    pidfd: int
    said_goodbye: bool = False


class Neighbours:
    """Connections of this rank to the other ranks of its group on this host.

    Args:
        me: this rank's card. cards: those of the whole group. here: those of this host, me included.
        listener: where the higher ranks of this host dial this one; None: `me` has a problem.
        store: the group's. timeout: seconds to wait for all connections.

    Raises:
        NotShared: ranks of some host can't reach each other; every rank of the group raises it.
    """

    def __init__(
        self,
        me: Card,
        cards: Sequence[Card],
        here: Sequence[Card],
        listener: Listener | None,
        store: Store,
        timeout: float,
    ) -> None:
        self.me, self.cards = me, list(here)
        self._by_rank: dict[int, _Neighbour] = {}
        self._parcels: dict[tuple[int, int], int] = {}
        problem = next((f"rank {card.rank}: {card.problem}" for card in cards if card.problem), "")
        try:
            if listener is not None and not problem:
                self._meet(listener, store, timeout)
        except (OSError, NotShared) as error:
            problem = f"rank {me.rank}: {error}"
        finally:
            if listener is not None:
                listener.close()
        self._vote(store, problem, len(cards), timeout)

    def _meet(self, listener: Listener, store: Store, timeout: float) -> None:
        for card in self.cards:
            if card.rank < self.me.rank:
                self._by_rank[card.rank] = self._dial(card)
        deadline = time.monotonic() + timeout
        missing = {card.rank: card for card in self.cards if card.rank > self.me.rank}
        while missing:
            answered = listener.answer()
            if answered is not None and answered[0] in missing:
                rank, caller = answered
                self._by_rank[rank] = self._known(missing.pop(rank), caller)
            elif any(store.check([f"shared/{rank}"]) for rank in missing):
                raise NotShared("a neighbour could not reach this rank")
            elif time.monotonic() > deadline:
                raise NotShared(f"ranks {sorted(missing)} did not connect within {timeout:g} s")

    def _dial(self, card: Card) -> _Neighbour:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            caller.connect(f"\0{card.address}")
            if _credentials(caller)[1] != os.getuid():
                raise NotShared(f"rank {card.rank} belongs to another user")
            caller.sendall(_HELLO.pack(self.me.rank, bytes.fromhex(card.token)))
        except ConnectionRefusedError:
            caller.close()
            raise NotShared(
                f"rank {card.rank} can't be reached by a Unix socket (another network namespace?)"
            ) from None
        except BaseException:
            caller.close()
            raise
        return self._known(card, caller)

    def _known(self, card: Card, connection: socket.socket) -> _Neighbour:
        connection.setblocking(False)
        pidfd = -1
        with contextlib.suppress(OSError, AttributeError):  # no pidfd: its exit code stays unknown
            pidfd = os.pidfd_open(_credentials(connection)[0])
        return _Neighbour(card, connection, pidfd)

    def _vote(self, store: Store, problem: str, size: int, timeout: float) -> None:
        """Have all ranks of the group come to the same end."""
        keys = [f"shared/{rank}" for rank in range(size)]
        store.set(f"shared/{self.me.rank}", problem or "yes")
        store.wait(keys, timedelta(seconds=timeout))
        votes = [store.get(key).decode() for key in keys]
        against = [vote for vote in votes if vote != "yes"]
        if against:
            self.close()
            raise NotShared(problem or against[0])

    def send_fd(self, rank: int, number: int, fd: int) -> None:
        """Hand a descriptor to `rank`, under a number of our own."""
        neighbour = self._by_rank[rank]
        while True:
            try:
                socket.send_fds(neighbour.socket, [_PARCEL.pack(_FD, number)], [fd])
                return
            except BlockingIOError:
                select.select([], [neighbour.socket], [], _LOOK_SECONDS)
            except OSError:
                return  # it has ended: whoever waits for it will say so

    def take_fd(self, rank: int, number: int) -> int | None:
        """Return the descriptor that `rank` sent under `number`; None: it did not come (yet)."""
        self._read(self._by_rank[rank])
        return self._parcels.pop((rank, number), None)

    def await_fd(self, rank: int, number: int) -> int:
        """Return the descriptor that `rank` sends under `number`, which is on its way.

        Raises:
            NotShared: the rank ended before it came.
        """
        neighbour = self._by_rank[rank]
        while (fd := self.take_fd(rank, number)) is None:
            if self._read(neighbour) and (rank, number) not in self._parcels:
                raise NotShared(f"rank {rank} ended while the group was made")
            select.select([neighbour.socket], [], [], _LOOK_SECONDS)
        return fd

    def ended(self) -> list[tuple[Card, bool]]:
        """Return the neighbours that are gone, and whether each took its leave."""
        return [(each.card, each.said_goodbye) for each in self._by_rank.values() if self._read(each)]

    def exit_of(self, rank: int) -> Exit:
        """Return how the process of `rank` ended, waiting a moment for it to be through with that."""
        neighbour = self._by_rank[rank]
        return exit_of(neighbour.pidfd, neighbour.card.pid)

    def stopped(self, rank: int) -> bool:
        """Tell whether the process of `rank` is stopped (SIGSTOP, a debugger)."""
        try:
            with open(f"/proc/{self._by_rank[rank].card.pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    def close(self) -> None:
        """Take leave of everybody."""
        for neighbour in self._by_rank.values():
            with contextlib.suppress(OSError):
                neighbour.socket.send(_PARCEL.pack(_GOODBYE, 0))
            neighbour.socket.close()
            if neighbour.pidfd >= 0:
                os.close(neighbour.pidfd)
        self._by_rank.clear()
        for fd in self._parcels.values():
            os.close(fd)
        self._parcels.clear()

    def _read(self, neighbour: _Neighbour) -> bool:
        """Take in what a neighbour sent, and return whether it is gone."""
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
            elif fds:
                self._parcels[neighbour.card.rank, number] = fds[0]


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
