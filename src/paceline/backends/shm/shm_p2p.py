"""Point-to-point messages between the ranks of a host: tagged send and receive through shared FIFOs.

Every ordered pair of ranks has a FIFO: a page with the bytes ever written and read, then a circular buffer. A message
is a header (tag, size) and its payload; long ones pass through piece by piece. One thread per process moves
everything, and sleeps on its rank's signal word when nothing can move.

    sender    | waits for space → copies in → signals the receiver
    receiver  | header → first posted receive for (source, tag), or the unexpected queue → copies out → signals back

A message without a posted receive stays in the FIFO, unless a receive is posted for one behind it.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.backends.collective_work import CollectiveWork
from paceline.backends.op_arguments import as_bytes, check_peer
from paceline.backends.shm import futex
from paceline.backends.shm.control_block import FIFO_NBYTES, ControlBlock
from paceline.backends.shm.shm_barrier import ShmBarrier
from paceline.errors import CollectiveError, UsageError

__all__ = ["ByteFifo", "ShmPointToPoint"]

_HEADER = struct.Struct("<qq")  # tag, bytes
_PAGE = 4096
_WRITTEN, _READ = 0, 64 // 8  # indices of 8-byte counters, each in its own cache line
_SLEEP_SECONDS = 0.1


class ByteFifo:
    """Bytes on their way from one rank to another, as seen from either end."""

    def __init__(self, control: ControlBlock, source: int, target: int) -> None:
        at = control.fifo(source, target)
        # Counters are read and written whole; struct's pack_into() writes zeros first, which the other end would see.
        self._counters = memoryview(control.segment.map)[at : at + _PAGE].cast("Q")
        self._data = control.segment.tensor(at + _PAGE, FIFO_NBYTES, torch.uint8)

    def readable(self) -> int:
        """Return how many bytes can be read."""
        nbytes = self._counters[_WRITTEN] - self._counters[_READ]
        futex.fence()
        return nbytes

    def writable(self) -> int:
        """Return how many bytes can be written."""
        return FIFO_NBYTES - self.readable()

    def write(self, data: Tensor) -> None:
        """Append bytes that fit."""
        self._move(_WRITTEN, data.numel(), lambda place, low, high: place.copy_(data[low:high]))

    def read(self, into: Tensor) -> None:
        """Remove bytes that are readable."""
        self._move(_READ, into.numel(), lambda place, low, high: into[low:high].copy_(place))

    def _move(self, counter: int, nbytes: int, copy: Callable[[Tensor, int, int], object]) -> None:
        count = self._counters[counter]
        start = count % FIFO_NBYTES
        first = min(nbytes, FIFO_NBYTES - start)
        copy(self._data[start : start + first], 0, first)
        if first < nbytes:
            copy(self._data[: nbytes - first], first, nbytes)
        futex.fence()
        self._counters[counter] = count + nbytes


class ReceiveWork(CollectiveWork):
    """A receive; knows its source once it is done."""

    source = -1

    def source_rank(self) -> int:
        """Return the rank, in the group, that sent the message."""
        return self.source

    _source_rank = source_rank


@dataclass(eq=False)
class _Message:
    """A message that is being sent or received.

    Attributes:
        data: its bytes.
        work: of a send; None: of a receive.
        moved: bytes that have passed the FIFO.
        started: its header has passed.
    """

    tag: int
    data: Tensor
    work: CollectiveWork | None = None
    moved: int = 0
    started: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _PostedReceive:
    """A receive that waits for its message; `source` None: from any rank."""

    source: int | None
    tag: int
    tensor: Tensor
    work: ReceiveWork
    since: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True)
class _PeerQueues:
    """Messages to and from another rank.

    Attributes:
        incoming: the message that is being received.
        matched: the receive that it is for; None: it goes to `unexpected`.
        header: a header (tag, size) that was read, whose payload still waits.
        unexpected: whole messages without a receive.
    """

    write_fifo: ByteFifo
    read_fifo: ByteFifo
    sends: deque[_Message] = field(default_factory=deque)
    incoming: _Message | None = None
    matched: _PostedReceive | None = None
    header: tuple[int, int] | None = None
    unexpected: list[_Message] = field(default_factory=list)


class ShmPointToPoint:
    """The messages of this rank.

    Args:
        barrier: the ranks of the host; knows which of them are gone, and the time-out.
    """

    def __init__(self, barrier: ShmBarrier) -> None:
        self._control, self._barrier, self._me = barrier.control, barrier, barrier.index
        self._peers = {
            rank: _PeerQueues(
                write_fifo=ByteFifo(self._control, self._me, rank),
                read_fifo=ByteFifo(self._control, rank, self._me),
            )
            for rank in range(barrier.size)
        }
        self._posted: list[_PostedReceive] = []
        self._completed: list[tuple[CollectiveWork, BaseException | None]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None

    def send(self, tensor: Tensor, target: int, tag: int) -> CollectiveWork:
        """Start sending a contiguous tensor; done once its bytes have left it."""
        check_peer("send", target, self._me, len(self._peers))
        work = CollectiveWork([tensor], f"send to rank {target}")
        message = _Message(tag, as_bytes(tensor), work)
        return self._start(work, lambda: self._peers[target].sends.append(message))

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> CollectiveWork:
        """Start receiving into a tensor, from `source` or, if None, from any rank."""
        if source is not None:
            check_peer("recv", source, self._me, len(self._peers))
        work = ReceiveWork([tensor], f"recv from {'any rank' if source is None else f'rank {source}'}")
        posted = _PostedReceive(source, tag, tensor.detach(), work)
        return self._start(work, lambda: self._posted.append(posted))

    def close(self) -> None:
        """Stop; pending messages fail."""
        self._closed = True
        self._signal(self._me)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._fail(CollectiveError("this rank left the group with messages pending"))

    def _start(self, work: CollectiveWork, enqueue: Callable[[], None]) -> CollectiveWork:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            enqueue()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline messages", daemon=True)
                self._thread.start()
        self._signal(self._me)
        return work

    def _signal(self, rank: int) -> None:
        futex.add(self._control.p2p_signal(rank))
        futex.wake(self._control.p2p_signal(rank))

    def _run(self) -> None:
        """Move all bytes that can move, and sleep when none can."""
        with torch.inference_mode():
            while not self._closed:
                seen = self._control.p2p_signal_count(self._me)
                try:
                    if not self._progress():
                        futex.wait(self._control.p2p_signal(self._me), seen, _SLEEP_SECONDS)
                        self._check_peers()
                except BaseException as error:  # noqa: BLE001 — raised by the wait() of every pending message
                    self._run_callbacks()
                    self._fail(error)
                    return

    def _progress(self) -> bool:
        """Move all bytes that can move, complete works, and return whether anything moved."""
        moved = False
        with self._lock:
            for rank, peer in self._peers.items():
                while self._push(peer) or self._pull(rank, peer):
                    self._signal(rank)
                    moved = True
        self._run_callbacks()
        return moved

    def _run_callbacks(self) -> None:
        """Mark works of completed messages as done.

        Callbacks run in a separate thread: they may wait for other messages, which only this thread moves.
        """
        completed, self._completed = self._completed, []
        for work, error in completed:
            run_callbacks = work.mark_done(error)
            if run_callbacks is not None:
                threading.Thread(target=run_callbacks, name="paceline callback", daemon=True).start()

    def _check_peers(self) -> None:
        """Raise if a pending message can't complete, or has timed out."""
        with self._lock:
            since = self._pending_since()
        if self._barrier.has_failed(since):
            moved = self._progress()  # what a rank sent before it ended
            with self._lock:
                since = self._pending_since()
            if not moved:
                self._barrier.check_peers(since)
        for rank, start in since.items():
            if time.monotonic() - start > self._barrier.timeout:
                self._barrier.raise_timeout(rank)

    def _pending_since(self) -> dict[int, float]:
        """Return the ranks that pending messages depend on, and since when."""
        since: dict[int, float] = {}
        for posted in self._posted:
            if posted.source is not None:
                since[posted.source] = min(posted.since, since.get(posted.source, posted.since))
        for rank, peer in self._peers.items():
            for message in [*peer.sends, *([peer.incoming] if peer.incoming is not None else [])]:
                since[rank] = min(message.since, since.get(rank, message.since))
        others = set(self._peers) - {self._me}
        if any(each.source is None for each in self._posted) and self._barrier.all_gone(others):
            since |= {rank: time.monotonic() for rank in others - set(since)}
        return since

    def _push(self, peer: _PeerQueues) -> bool:
        """Move a piece of the next message out, and return whether that was possible."""
        if not peer.sends:
            return False
        message, fifo = peer.sends[0], peer.write_fifo
        if not message.started:
            if fifo.writable() < _HEADER.size:
                return False
            header = _HEADER.pack(message.tag, message.data.numel())
            fifo.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            message.started = True
        elif message.moved < message.data.numel():
            nbytes = min(fifo.writable(), message.data.numel() - message.moved)
            if nbytes == 0:
                return False
            fifo.write(message.data[message.moved : message.moved + nbytes])
            message.moved += nbytes
        if message.moved == message.data.numel():
            peer.sends.popleft()
            assert message.work is not None, "a message that is sent has a sender"
            self._completed.append((message.work, None))
        return True

    def _pull(self, rank: int, peer: _PeerQueues) -> bool:
        """Move a piece of the next message in, and return whether that was possible."""
        for message in peer.unexpected:
            posted = self._find_receive(rank, message.tag)
            if posted is not None:
                peer.unexpected.remove(message)
                self._posted.remove(posted)
                self._deliver(rank, posted, message.data)
                return True
        if peer.incoming is None:
            peer.incoming = self._open(rank, peer)
        message = peer.incoming
        if message is None:
            return False
        nbytes = min(peer.read_fifo.readable(), message.data.numel() - message.moved)
        if nbytes == 0 and message.data.numel():
            return False
        peer.read_fifo.read(message.data[message.moved : message.moved + nbytes])
        message.moved += nbytes
        if message.moved == message.data.numel():
            peer.incoming = None
            if peer.matched is not None:
                self._deliver(rank, peer.matched, message.data)
                peer.matched = None
            else:
                peer.unexpected.append(message)
        return True

    def _open(self, rank: int, peer: _PeerQueues) -> _Message | None:
        """Return the next message with memory to receive it; None: none has begun, or no receive needs it yet."""
        if peer.header is None:
            if peer.read_fifo.readable() < _HEADER.size:
                return None
            raw = torch.empty(_HEADER.size, dtype=torch.uint8)
            peer.read_fifo.read(raw)
            tag, nbytes = _HEADER.unpack(raw.numpy().tobytes())
            peer.header = tag, nbytes
        tag, nbytes = peer.header
        posted = self._find_receive(rank, tag)
        if posted is None and not any(each.source in (None, rank) for each in self._posted):
            return None
        peer.header, peer.matched = None, posted
        if posted is not None:
            self._posted.remove(posted)
            if posted.tensor.is_contiguous() and posted.tensor.nbytes == nbytes:
                return _Message(tag, as_bytes(posted.tensor))
        return _Message(tag, torch.empty(nbytes, dtype=torch.uint8))

    def _find_receive(self, rank: int, tag: int) -> _PostedReceive | None:
        return next((each for each in self._posted if each.source in (None, rank) and each.tag == tag), None)

    def _deliver(self, rank: int, posted: _PostedReceive, data: Tensor) -> None:
        tensor, error = posted.tensor, None
        posted.work.source = rank
        if tensor.nbytes != data.numel():
            error = UsageError(
                f"recv: the message from rank {rank} (tag {posted.tag}) has {data.numel()} bytes, "
                f"the tensor {tensor.nbytes}",
                remedy="receive into a tensor of the size and dtype that was sent",
            )
        elif not (tensor.is_contiguous() and tensor.data_ptr() == data.data_ptr()):
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
        self._completed.append((posted.work, error))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = error
            works = [each.work for each in self._posted]
            for peer in self._peers.values():
                works += [message.work for message in peer.sends if message.work is not None]
                works += [peer.matched.work] if peer.matched is not None else []
        for work in works:
            work.finish(error)
