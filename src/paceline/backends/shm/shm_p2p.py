"""Messages from one rank of a host to another: send and receive, with tags, through shared rings.

Every ordered pair of ranks has a ring: a page with how much was ever written and read, then the bytes. A
message is a header (tag, size) and its payload; long ones pass through the ring piece by piece. One thread
per process moves everything, and sleeps on the rank's bell when nothing moves.

    sender    | waits for room → copies in → rings the receiver's bell
    receiver  | header → the first receive posted for (source, tag), else its own store → copies out → rings back

A message nobody asked for yet stays in the ring, unless a receive is posted for one behind it.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.backends.async_work import CollectiveWork
from paceline.backends.op_arguments import bytes_of, check_peer
from paceline.backends.shm import futex
from paceline.backends.shm.control_block import RING_NBYTES, ControlBlock
from paceline.backends.shm.shm_barrier import ShmBarrier
from paceline.errors import CollectiveError, UsageError

__all__ = ["ShmPointToPoint"]

_HEADER = struct.Struct("<qq")  # tag, bytes
_PAGE = 4096
_WRITTEN, _READ = 0, 64 // 8  # numbers of 8-byte words, each in a cache line of its own
_SLEEP_SECONDS = 0.1


class Ring:
    """Bytes under way from one rank to another, as seen from either end."""

    def __init__(self, board: ControlBlock, source: int, target: int) -> None:
        self._board, self._at = board, board.ring(source, target)
        # Words are read and written whole; struct's pack_into() writes zeros first, which the other end would see.
        self._counts = memoryview(board.segment.map)[self._at : self._at + _PAGE].cast("Q")
        self._data = board.segment.tensor(self._at + _PAGE, RING_NBYTES, torch.uint8)

    def full(self) -> int:
        """Return how many bytes can be read."""
        nbytes = self._counts[_WRITTEN] - self._counts[_READ]
        futex.fence()
        return nbytes

    def room(self) -> int:
        """Return how many bytes can be written."""
        return RING_NBYTES - self.full()

    def write(self, data: torch.Tensor) -> None:
        """Append bytes, for which there is room."""
        self._move(_WRITTEN, data.numel(), lambda place, low, high: place.copy_(data[low:high]))

    def read(self, into: torch.Tensor) -> None:
        """Take out bytes, which are there."""
        self._move(_READ, into.numel(), lambda place, low, high: into[low:high].copy_(place))

    def _move(self, counter: int, nbytes: int, copy: Callable[[torch.Tensor, int, int], object]) -> None:
        done = self._counts[counter]
        start = done % RING_NBYTES
        first = min(nbytes, RING_NBYTES - start)
        copy(self._data[start : start + first], 0, first)
        if first < nbytes:
            copy(self._data[: nbytes - first], first, nbytes)
        futex.fence()
        self._counts[counter] = done + nbytes


@dataclass(eq=False)
class _Message:
    """A message on its way out, or in.

    Attributes:
        data: its bytes, `nbytes` of them; moved: how many have passed the ring.
        work: what the caller waits for; None while nobody asked for it.
        started: its header has passed.
    """

    tag: int
    data: torch.Tensor
    work: CollectiveWork | None
    moved: int = 0
    started: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Posted:
    """A receive that waits for its message; `source` None: from anybody."""

    source: int | None
    tag: int
    tensor: torch.Tensor
    work: ReceiveWork
    since: float = field(default_factory=time.monotonic)


class ReceiveWork(CollectiveWork):
    """A receive under way; knows at its end who sent."""

    source = -1

    def source_rank(self) -> int:
        """Return the rank, in the group, that the message came from."""
        return self.source

    _source_rank = source_rank


@dataclass
class _Peer:
    outgoing: Ring
    incoming: Ring
    sends: deque[_Message] = field(default_factory=deque)
    arriving: _Message | None = None
    posted: _Posted | None = None  # the receive that `arriving` is for
    head: tuple[int, int] | None = None  # a header that was read, whose payload is not taken yet
    stored: list[_Message] = field(default_factory=list)


class ShmPointToPoint:
    """The messages of this rank.

    Args:
        meeting: the ranks of the host; knows who is gone, and how long to wait for a rank.
    """

    def __init__(self, meeting: ShmBarrier) -> None:
        board = meeting.board
        self._board, self._meeting = board, meeting
        self._me = board.index
        self._peers = {
            rank: _Peer(Ring(board, self._me, rank), Ring(board, rank, self._me))
            for rank in range(board.size)
        }
        self._posted: list[_Posted] = []
        self._ended: list[tuple[CollectiveWork, BaseException | None]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> CollectiveWork:
        """Start sending a contiguous tensor; done once its bytes have left it."""
        check_peer("send", target, self._me, self._board.size)
        work = CollectiveWork([tensor], f"send to rank {target}")
        message = _Message(tag, bytes_of(tensor), work)
        return self._start(work, lambda: self._peers[target].sends.append(message))

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> CollectiveWork:
        """Start receiving into a tensor, from `source` or, if None, from anybody."""
        if source is not None:
            check_peer("recv", source, self._me, self._board.size)
        work = ReceiveWork([tensor], f"recv from {'anybody' if source is None else f'rank {source}'}")
        posted = _Posted(source, tag, tensor.detach(), work)
        return self._start(work, lambda: self._posted.append(posted))

    def close(self) -> None:
        """Stop; what is under way stays undone, and fails."""
        self._closed = True
        self._ring(self._me)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._fail(CollectiveError("the group was left with messages under way"))

    def _start(self, work: CollectiveWork, enter: Callable[[], None]) -> CollectiveWork:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            enter()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="paceline mailbox", daemon=True)
                self._thread.start()
        self._ring(self._me)
        return work

    def _ring(self, rank: int) -> None:
        futex.add(self._board.bell(rank))
        futex.wake(self._board.bell(rank))

    def _serve(self) -> None:
        """Move what can be moved, and sleep when nothing can."""
        with torch.inference_mode():
            while not self._closed:
                seen = self._board.bell_count(self._me)
                try:
                    with self._lock:
                        moved = self._turn()
                    self._tell()
                    if not moved:
                        futex.wait(self._board.bell(self._me), seen, _SLEEP_SECONDS)
                        self._look()
                except BaseException as error:  # noqa: BLE001 — told to whoever waits for a message
                    self._tell()
                    self._fail(error)
                    return

    def _look(self) -> None:
        """Raise if a message that is waited for can't come, or takes too long."""
        with self._lock:
            since = self._waiting()
        if self._meeting.miss(since):
            with self._lock:
                last = self._turn()  # what a rank sent before it went
                since = self._waiting()
            self._tell()
            if not last:
                self._meeting.give_up_on(since)
        for rank, start in since.items():
            if time.monotonic() - start > self._meeting.timeout:
                self._meeting.time_out_on(rank)

    def _waiting(self) -> dict[int, float]:
        """Return the ranks that messages are waited for from, or to be taken by, and since when."""
        since: dict[int, float] = {}
        for posted in self._posted:
            if posted.source is not None:
                since[posted.source] = min(posted.since, since.get(posted.source, posted.since))
        for rank, peer in self._peers.items():
            pending = [*peer.sends, *([peer.arriving] if peer.arriving is not None else [])]
            for message in pending:
                since[rank] = min(message.since, since.get(rank, message.since))
        others = set(self._peers) - {self._me}
        if any(each.source is None for each in self._posted) and self._meeting.all_gone(others):
            since |= {rank: time.monotonic() for rank in others - set(since)}
        return since

    def _tell(self) -> None:
        """Tell whoever waits for a message that ended.

        Callbacks get a thread of their own: they may wait for other messages, which only this thread moves.
        """
        ended, self._ended = self._ended, []
        for work, error in ended:
            call_back = work.settle(error)
            if call_back is not None:
                threading.Thread(target=call_back, name="paceline callback", daemon=True).start()

    def _turn(self) -> bool:
        moved = False
        for rank, peer in self._peers.items():
            while self._push(peer) or self._pull(rank, peer):
                self._ring(rank)
                moved = True
        return moved

    def _push(self, peer: _Peer) -> bool:
        """Move a piece of the next message out, and return whether that was possible."""
        if not peer.sends:
            return False
        message, ring = peer.sends[0], peer.outgoing
        if not message.started:
            if ring.room() < _HEADER.size:
                return False
            header = _HEADER.pack(message.tag, message.data.numel())
            ring.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            message.started = True
        elif message.moved < message.data.numel():
            nbytes = min(ring.room(), message.data.numel() - message.moved)
            if nbytes == 0:
                return False
            ring.write(message.data[message.moved : message.moved + nbytes])
            message.moved += nbytes
        if message.moved == message.data.numel():
            peer.sends.popleft()
            assert message.work is not None, "a message that is sent has a sender"
            self._ended.append((message.work, None))
        return True

    def _pull(self, rank: int, peer: _Peer) -> bool:
        """Move a piece of the next message in, and return whether that was possible."""
        if self._take_stored(rank, peer):
            return True
        if peer.arriving is None and not self._open(rank, peer):
            return False
        message = peer.arriving
        assert message is not None, "just opened"
        nbytes = min(peer.incoming.full(), message.data.numel() - message.moved)
        if nbytes == 0 and message.data.numel():
            return False
        peer.incoming.read(message.data[message.moved : message.moved + nbytes])
        message.moved += nbytes
        if message.moved == message.data.numel():
            peer.arriving = None
            if peer.posted is not None:
                self._deliver(rank, peer.posted, message.data)
                peer.posted = None
            else:
                peer.stored.append(message)
        return True

    def _open(self, rank: int, peer: _Peer) -> bool:
        """Find a place for the message whose header is next, and return whether there is one."""
        if peer.head is None:
            if peer.incoming.full() < _HEADER.size:
                return False
            raw = torch.empty(_HEADER.size, dtype=torch.uint8)
            peer.incoming.read(raw)
            tag, nbytes = _HEADER.unpack(raw.numpy().tobytes())
            peer.head = (tag, nbytes)
        tag, nbytes = peer.head
        posted = self._match(rank, tag)
        if posted is None and not any(each.source in (None, rank) for each in self._posted):
            return False
        if posted is not None:
            self._posted.remove(posted)
        peer.head, peer.posted = None, posted
        tensor = posted.tensor if posted is not None else None
        direct = tensor is not None and tensor.is_contiguous() and tensor.nbytes == nbytes
        data = bytes_of(tensor) if direct and tensor is not None else torch.empty(nbytes, dtype=torch.uint8)
        peer.arriving = _Message(tag, data, None)
        return True

    def _match(self, rank: int, tag: int) -> _Posted | None:
        return next((each for each in self._posted if each.source in (None, rank) and each.tag == tag), None)

    def _take_stored(self, rank: int, peer: _Peer) -> bool:
        for message in peer.stored:
            posted = self._match(rank, message.tag)
            if posted is not None:
                peer.stored.remove(message)
                self._posted.remove(posted)
                self._deliver(rank, posted, message.data)
                return True
        return False

    def _deliver(self, rank: int, posted: _Posted, data: torch.Tensor) -> None:
        tensor, work = posted.tensor, posted.work
        work.source = rank
        if tensor.nbytes != data.numel():
            error = UsageError(
                f"recv: the message from rank {rank} (tag {posted.tag}) has {data.numel()} bytes, "
                f"the tensor {tensor.nbytes}",
                remedy="receive into a tensor of the size and dtype that was sent",
            )
            self._ended.append((work, error))
            return
        if not (tensor.is_contiguous() and tensor.data_ptr() == data.data_ptr()):
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
        self._ended.append((work, None))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = error
            works = [each.work for each in self._posted]
            for peer in self._peers.values():
                works += [message.work for message in peer.sends if message.work is not None]
                works += [peer.posted.work] if peer.posted is not None else []
        for work in works:
            work.finish(error)
