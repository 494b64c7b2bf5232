"""Execution of a schedule's rounds by one rank over send and receive: streaming, or in lockstep.

[Note: streaming] A run of chunks travels in pieces. A rank posts the receives of a round, then starts the round's
sends piece by piece. Each piece waits only for the receives of earlier rounds that overlap it. So
while one piece of a ring is added, the piece before is already on its way to the next rank, and the wire never waits
for a round to end. Every write waits first for the sends that still read there. A rank only waits for its own round
or an earlier one, so ranks cannot wait in a circle.

[Note: slices] A piece that is added lands in a separate buffer first, and streaming keeps two rounds in progress: two
chunks of memory written for the first time, which takes longer than adding them where chunks are large. So large
chunks are cut into slices. All rounds run for the first slice of every chunk, then for the second one, and the
landing buffers of one slice serve the next.

[Note: one after another] A send completes when the system has taken its bytes, megabytes of which may still wait for a
slow link; another send then takes a share of that link. Where the order matters, as in a tree, the first messages
then arrive late and everything after them later still. With `orderly`, a rank starts with another receiver only when
the last one has confirmed: one small message back, only where receivers change.

[Note: lockstep] The reference implementation that tests compare the other with: a round is one batch, waited for as a
whole. NCCL needs it, since its sends and receives between two ranks block each other unless started together.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import xxhash

from paceline.collectives.chunk_buffers import ChunkBuffers, Region
from paceline.collectives.delivery_receipts import TransferLog, TransferRecord
from paceline.collectives.schedule import Schedule, Send

__all__ = ["LockstepExecutor", "StreamingExecutor"]

_SLICE_PIECES = 4  # pieces of a chunk in one slice, see [Note: slices]
_TAG = 61_000  # of all messages: between two ranks they are received in the order in which they were sent


@dataclass(eq=False)
class _Transfer:
    """A send of the schedule at one of its ends, with its progress; its pieces may complete in any order."""

    number: int  # of the round
    send: Send
    remaining: int  # elements
    nbytes: int = 0
    checksum: int = 0


class _Executor(ABC):
    """Base of both: this rank's transfers, and the records of them if `checksums`."""

    def __init__(
        self,
        buffers: ChunkBuffers,
        group: dist.ProcessGroup | None,
        segment_nbytes: int,
        *,
        checksums: bool,
        orderly: bool,
    ) -> None:
        self.schedule, self.buffers, self.rank = buffers.schedule, buffers, buffers.rank
        self.group, self.checksums, self.orderly = group, checksums, orderly
        self.piece_numel = max(1, segment_nbytes // buffers.tensors[0].element_size())
        self.log = TransferLog()
        self._began = time.perf_counter()

    @abstractmethod
    def run(self) -> None:
        """Execute all rounds."""

    def finish_log(self, *, failed: bool = False) -> TransferLog:
        """Return the records, with the time and the checksum of the result."""
        self.log.seconds = time.perf_counter() - self._began
        if not failed:
            self.log.checksum = xxhash.xxh3_64_intdigest(_bytes(self.buffers.result()))
        return self.log

    def _transfers(self) -> list[list[_Transfer]]:
        """Return this rank's transfers by round."""
        return [
            [
                _Transfer(number, send, sum(region.numel for region in self.buffers.regions(send)))
                for send in sends
                if self.rank in (send.src, send.dst)
            ]
            for number, sends in enumerate(self.schedule.rounds)
        ]

    def _record(
        self, records: list[TransferRecord], transfer: _Transfer, offset: int, piece: torch.Tensor
    ) -> None:
        """Count a piece, `offset` elements into its transfer; the last one completes the record."""
        if not self.checksums:
            return
        transfer.checksum += xxhash.xxh3_64_intdigest(_bytes(piece), seed=offset)
        transfer.nbytes += piece.nbytes
        transfer.remaining -= piece.numel()
        if not transfer.remaining:
            seconds, checksum = time.perf_counter() - self._began, transfer.checksum % 2**64
            message = transfer.number, *transfer.send[:3]
            records.append(TransferRecord(*message, transfer.nbytes, checksum, seconds))


class LockstepExecutor(_Executor):
    """One batch per round, see [Note: lockstep]."""

    def run(self) -> None:
        """Execute all rounds."""
        for transfers in self._transfers():
            calls, receives = [], []
            for transfer in transfers:
                sends = transfer.send.src == self.rank
                peer = transfer.send.dst if sends else transfer.send.src
                for offset, region in self.buffers.slices(transfer.send, 0, 1):
                    data = buffer = self.buffers.view(region)
                    if sends:
                        self._record(self.log.sent, transfer, offset, data)
                    else:
                        buffer = torch.empty_like(data)
                        receives.append((transfer, offset, data, buffer))
                    op = dist.isend if sends else dist.irecv
                    calls.append(dist.P2POp(op, buffer, group=self.group, tag=_TAG, group_peer=peer))
            for work in dist.batch_isend_irecv(calls) if calls else []:
                work.wait()
            for transfer, offset, data, received in receives:
                self._record(self.log.received, transfer, offset, received)
                _write(data, received, add=transfer.send.add)


@dataclass(eq=False)
class _PendingReceive:
    """A piece whose receive was posted: into `landing`, or if that is None directly into `region`."""

    transfer: _Transfer
    offset: int  # elements from the beginning of the transfer
    region: Region
    work: dist.Work
    landing: torch.Tensor | None


class StreamingExecutor(_Executor):
    """Piece by piece, see [Note: streaming]; if `orderly`, also [Note: one after another]."""

    def run(self) -> None:
        """Execute all rounds."""
        self._receives: list[_PendingReceive] = []
        self._sends: list[tuple[Region, dist.Work]] = []
        self._free_buffers: dict[int, list[torch.Tensor]] = defaultdict(list)  # by number of elements
        rounds = self._transfers()
        confirmations = _confirmations(self.schedule) if self.orderly else {}
        largest = -(-self.buffers.numel // self.schedule.parts)  # elements of the largest chunk
        slices = 1 if self.orderly else max(1, -(-largest // (_SLICE_PIECES * self.piece_numel)))
        for part in range(slices):
            for number, transfers in enumerate(rounds):
                self._start_round(transfers, part, slices)
                self._confirm(number, confirmations.get(number, []))
        self._complete_receives()
        self._complete_sends()

    def _start_round(self, transfers: list[_Transfer], part: int, slices: int) -> None:
        """Post the receives and sends of one slice of a round."""
        regions_of = {each: self.buffers.slices(each.send, part, slices) for each in transfers}
        outgoing = [transfer for transfer in transfers if transfer.send.src == self.rank]
        read = [region for transfer in outgoing for _, region in regions_of[transfer]]
        for transfer, regions in regions_of.items():
            if transfer.send.dst == self.rank:
                self._post_receives(transfer, regions, read)
        for transfer in outgoing:
            self._post_sends(transfer, regions_of[transfer])

    def _pieces(self, regions: list[tuple[int, Region]]) -> Iterator[tuple[int, Region]]:
        for offset, whole in regions:
            for region in whole.pieces(self.piece_numel):
                yield offset + region.begin - whole.begin, region

    def _post_receives(
        self, transfer: _Transfer, regions: list[tuple[int, Region]], read: list[Region]
    ) -> None:
        """Post receives in place, or into landing buffers where they are added or this round still reads."""
        buffered = transfer.send.add or any(one.overlaps(region) for _, one in regions for region in read)
        for offset, region in self._pieces(regions):
            if buffered:
                landing = self._landing_buffer(region.numel)
            else:
                self._complete_receives(region)
                self._complete_sends(region)
                landing = None
            data = self.buffers.view(region) if landing is None else landing
            work = self._irecv(data, transfer.send.src)
            self._receives.append(_PendingReceive(transfer, offset, region, work, landing))

    def _post_sends(self, transfer: _Transfer, regions: list[tuple[int, Region]]) -> None:
        """Start the sends of a transfer, each piece as soon as it is complete."""
        for offset, region in self._pieces(regions):
            self._complete_receives(region, before=transfer.number)
            data = self.buffers.view(region)
            self._record(self.log.sent, transfer, offset, data)
            self._sends.append((region, self._isend(data, transfer.send.dst)))

    def _confirm(self, number: int, confirmations: list[tuple[int, int]]) -> None:
        """Send the confirmations of this round that others wait for, and wait for those that this rank needs."""
        token = torch.zeros(1, dtype=torch.uint8, device=self.buffers.tensors[0].device)
        works = []
        for src, dst in confirmations:
            if dst == self.rank:
                self._complete_receives_from(src, number)
                works.append(self._isend(token, src, _TAG + 1))
        works += [self._irecv(token, dst, _TAG + 1) for src, dst in confirmations if src == self.rank]
        for work in works:
            work.wait()

    def _isend(self, tensor: torch.Tensor, dst: int, tag: int = _TAG) -> dist.Work:
        work = dist.isend(tensor, group=self.group, tag=tag, group_dst=dst)
        assert work is not None, "this rank is in the group"
        return work

    def _irecv(self, tensor: torch.Tensor, src: int, tag: int = _TAG) -> dist.Work:
        work = dist.irecv(tensor, group=self.group, tag=tag, group_src=src)
        assert work is not None, "this rank is in the group"
        return work

    def _complete_receives(self, region: Region | None = None, before: int | None = None) -> None:
        """Wait for the receives that overlap `region` (None: all), in rounds `before` (None: any); store them."""
        pending = []
        for piece in self._receives:
            earlier = before is None or piece.transfer.number < before
            if earlier and (region is None or piece.region.overlaps(region)):
                self._complete_receive(piece)
            else:
                pending.append(piece)
        self._receives = pending

    def _complete_receives_from(self, src: int, number: int) -> None:
        """Wait for everything that `src` sends in round `number`, and for earlier receives at the same place."""
        for piece in self._receives.copy():
            if piece.transfer.number == number and piece.transfer.send.src == src:
                self._complete_receives(piece.region, before=number)
                if piece in self._receives:
                    self._receives.remove(piece)
                    self._complete_receive(piece)

    def _complete_receive(self, piece: _PendingReceive) -> None:
        piece.work.wait()
        data = self.buffers.view(piece.region)
        received = data if piece.landing is None else piece.landing
        self._record(self.log.received, piece.transfer, piece.offset, received)
        if piece.landing is not None:
            self._complete_sends(piece.region)
            _write(data, piece.landing, add=piece.transfer.send.add)
            self._free_buffers[piece.landing.numel()].append(piece.landing)

    def _complete_sends(self, region: Region | None = None) -> None:
        """Wait until no send reads `region`; None: anything."""
        pending = []
        for source, work in self._sends:
            if region is None or source.overlaps(region):
                work.wait()
            else:
                pending.append((source, work))
        self._sends = pending

    def _landing_buffer(self, numel: int) -> torch.Tensor:
        free = self._free_buffers[numel]  # the last one used is still in the caches
        return free.pop() if free else torch.empty_like(self.buffers.tensors[0][:numel])


def _confirmations(schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Return by round the messages (src, dst) after which their sender turns to another receiver."""
    targets: dict[int, dict[int, set[int]]] = defaultdict(dict)  # of each sender: round → receivers
    for number, sends in enumerate(schedule.rounds):
        for send in sends:
            targets[send.src].setdefault(number, set()).add(send.dst)
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for src, receivers in targets.items():
        for (number, current), (_, following) in pairwise(sorted(receivers.items())):
            if following - current:
                found[number] += [(src, dst) for dst in sorted(current)]
    return found


def _write(data: torch.Tensor, received: torch.Tensor, *, add: bool) -> None:
    data.add_(received) if add else data.copy_(received)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().view(torch.uint8).numpy().data
