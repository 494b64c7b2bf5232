"""Carrying out the rounds of a schedule as one rank: piece by piece, or round by round.

[Note: streaming] A run of chunks travels in pieces. A rank posts the receives of a round, then starts the round's
sends piece by piece; for each it first waits for what that piece needs, and no more: the receives of earlier rounds
that meet it. So while one piece of a ring is added, the one before is on its way to the next rank already, and the
wire never waits for a round to end. Whatever is written waits first for the sends that still read it. What is waited
for belongs to this round or an earlier one, so ranks cannot wait in a circle.

[Note: slices] What is added lands in other memory first, and streaming asks for two rounds at once: two chunks of
memory that are written for the first time, which takes longer than adding them where chunks are large. So large
chunks are cut into slices, all rounds are gone through for the first slice of every chunk, then for the second one,
and the memory in which one slice landed serves the next.

[Note: one after another] A send is done when the system has taken its bytes, megabytes of which may still wait for a
slow link; what is sent to somebody else meanwhile takes a share of that link. Where the order matters, as in a tree,
the first ones then arrive late and everybody after them later still. So a rank can be told to begin with another
receiver only when the last one has confirmed: one small message back, where receivers change and nowhere else.

[Note: lockstep] The plain version, which tests hold the other against: a round is one batch, waited for as a whole.
NCCL needs it, since its sends and receives between two ranks block each other unless they are started together.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from paceline.collectives.chunk_memory import ChunkMemory, Region
from paceline.collectives.delivery_receipts import TransferLog, TransferNote
from paceline.collectives.schedule import Schedule, Send

__all__ = ["Lockstep", "Streaming"]

_SLICE_PIECES = 4  # of a chunk in one slice, see [Note: slices]
_TAG = 61_000  # of all messages: between two ranks they are taken in the order in which they were sent


@dataclass(eq=False)
class _Run:
    """A run of chunks at one of its ends: what of it has gone or come, in whatever order its pieces did."""

    number: int
    send: Send
    left: int  # elements
    nbytes: int = 0
    checksum: int = 0


class _Carrier:
    """What both ways have in common: whom messages go to, and the notes of what went and came.

    Args:
        schedule, memory: what is sent, and where it lies.
        group: the process group; None: the default one.
        segment_nbytes: size of the pieces in which chunks travel.
        checksums: whether to note what is sent and received.
    """

    def __init__(
        self,
        schedule: Schedule,
        memory: ChunkMemory,
        group: dist.ProcessGroup | None,
        segment_nbytes: int,
        checksums: bool,
    ) -> None:
        self.schedule, self.memory, self.group = schedule, memory, group
        self.rank = memory.rank
        self.most = max(1, segment_nbytes // memory.tensors[0].element_size())  # elements of a piece
        self.checksums = checksums
        self.log = TransferLog()
        self.began = time.perf_counter()

    def finished_log(self, *, failed: bool = False) -> TransferLog:
        """Return the notes, with the time and the checksum of the result."""
        self.log.seconds = time.perf_counter() - self.began
        if not failed:
            self.log.checksum = xxhash.xxh3_64_intdigest(_bytes(self.memory.result()))
        return self.log

    def _peer(self, rank: int) -> int:
        """Return the global number of a rank of the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _run(self, number: int, send: Send) -> _Run:
        return _Run(number, send, sum(one.end - one.begin for one in self.memory.regions(send)))

    def _note(self, notes: list[TransferNote], run: _Run, offset: int, piece: torch.Tensor) -> None:
        """Count a piece, `offset` elements into its run, that goes or has come; with the last one the run is noted."""
        if not self.checksums:
            return
        run.checksum += xxhash.xxh3_64_intdigest(_bytes(piece), seed=offset)
        run.nbytes += piece.nbytes
        run.left -= piece.numel()
        if not run.left:
            src, dst, chunk = run.send[:3]
            seconds = time.perf_counter() - self.began
            notes.append(TransferNote(run.number, src, dst, chunk, run.nbytes, run.checksum % 2**64, seconds))


class Lockstep(_Carrier):
    """Round by round, see [Note: lockstep]."""

    def carry(self) -> None:
        """Carry out all rounds."""
        for number, sends in enumerate(self.schedule.rounds):
            calls, arriving = [], []
            for send in sends:
                run = self._run(number, send)
                for offset, region in self.memory.slices(send, 0, 1) if self.rank in send[:2] else []:
                    data = self.memory.view(region)
                    if send.src == self.rank:
                        self._note(self.log.sent, run, offset, data)
                        calls.append(dist.P2POp(dist.isend, data, self._peer(send.dst), self.group, _TAG))
                    else:
                        fresh = torch.empty_like(data)
                        arriving.append((run, offset, data, fresh))
                        calls.append(dist.P2POp(dist.irecv, fresh, self._peer(send.src), self.group, _TAG))
            for work in dist.batch_isend_irecv(calls) if calls else []:
                work.wait()
            for run, offset, data, fresh in arriving:
                self._note(self.log.received, run, offset, fresh)
                _put(data, fresh, add=run.send.add)


@dataclass(eq=False)
class _Arriving:
    """A piece that was asked for: where it goes, and where it lands if that is somewhere else."""

    run: _Run
    offset: int  # elements from the begin of the run
    region: Region
    work: dist.Work
    landing: torch.Tensor | None


class Streaming(_Carrier):
    """Piece by piece, see [Note: streaming]; if `orderly`, also [Note: one after another]."""

    def __init__(self, *settings: Any, orderly: bool = False) -> None:
        super().__init__(*settings)
        self.orderly = orderly

    def carry(self) -> None:
        """Carry out all rounds."""
        self._arriving: list[_Arriving] = []
        self._leaving: list[tuple[Region, dist.Work]] = []
        self._spare: dict[int, list[torch.Tensor]] = defaultdict(list)  # by number of elements
        runs = [
            [self._run(number, send) for send in sends if self.rank in send[:2]]
            for number, sends in enumerate(self.schedule.rounds)
        ]
        confirmed = _confirmed(self.schedule) if self.orderly else {}
        numel = -(-self.memory.numel // self.schedule.parts)  # of the largest chunk
        count = 1 if self.orderly else max(1, -(-numel // (_SLICE_PIECES * self.most)))
        for part in range(count):
            for number, of_round in enumerate(runs):
                self._round(of_round, part, count)
                self._confirm(number, confirmed.get(number, []))
        self._settle(None)
        self._let_go(None)

    def _round(self, runs: list[_Run], part: int, count: int) -> None:
        """Ask for and send what a slice of a round has for this rank."""
        regions_of = {run: self.memory.slices(run.send, part, count) for run in runs}
        read_now = [one for run, found in regions_of.items() if run.send.src == self.rank for _, one in found]
        for run, found in regions_of.items():
            if run.send.dst == self.rank:
                self._ask(run, found, read_now)
        for run, found in regions_of.items():
            if run.send.src == self.rank:
                self._send(run, found)

    def _cut(self, regions: list[tuple[int, Region]]) -> Iterator[tuple[int, Region]]:
        """Yield how far into its run each piece begins, and where it is, in elements."""
        for offset, whole in regions:
            for region in whole.pieces(self.most):
                yield offset + region.begin - whole.begin, region

    def _confirm(self, number: int, confirmed: list[tuple[int, int]]) -> None:
        """Confirm what has to be of this round, and wait for the confirmations that this rank needs."""
        token = torch.zeros(1, dtype=torch.uint8, device=self.memory.tensors[0].device)
        works = []
        for src, dst in confirmed:
            if dst == self.rank:
                self._settle_from(src, number)
                works.append(dist.isend(token, self._peer(src), self.group, _TAG + 1))
        for src, dst in confirmed:
            if src == self.rank:
                works.append(dist.irecv(token, self._peer(dst), self.group, _TAG + 1))
        for work in works:
            work.wait()

    def _ask(self, run: _Run, regions: list[tuple[int, Region]], read_now: list[Region]) -> None:
        """Post the receives of a run: where it belongs, unless it is added or this round still reads there."""
        aside = run.send.add or any(one.meets(region) for _, one in regions for region in read_now)
        for offset, region in self._cut(regions):
            if aside:
                landing = self._take(region.end - region.begin)
            else:
                self._settle(region)
                self._let_go(region)
                landing = None
            data = self.memory.view(region) if landing is None else landing
            work = dist.irecv(data, self._peer(run.send.src), self.group, _TAG)
            assert work is not None, "this rank is in the group"
            self._arriving.append(_Arriving(run, offset, region, work, landing))

    def _send(self, run: _Run, regions: list[tuple[int, Region]]) -> None:
        """Start a run's sends, each piece as soon as it is complete."""
        for offset, region in self._cut(regions):
            self._settle(region, before=run.number)
            data = self.memory.view(region)
            self._note(self.log.sent, run, offset, data)
            work = dist.isend(data, self._peer(run.send.dst), self.group, _TAG)
            assert work is not None, "this rank is in the group"
            self._leaving.append((region, work))

    def _settle(self, region: Region | None, before: int | None = None) -> None:
        """Wait for what was asked for and meets `region` (None: everything), in rounds `before`; put it in place."""
        waiting = []
        for piece in self._arriving:
            mine = (region is None or piece.region.meets(region)) and (
                before is None or piece.run.number < before
            )
            if mine:
                self._take_in(piece)
            else:
                waiting.append(piece)
        self._arriving = waiting

    def _settle_from(self, src: int, number: int) -> None:
        """Wait for all that `src` sends in round `number`, and for what has to be in place before that."""
        for piece in [one for one in self._arriving if one.run.number == number and one.run.send.src == src]:
            self._settle(piece.region, before=number)
            if piece in self._arriving:
                self._arriving.remove(piece)
                self._take_in(piece)

    def _take_in(self, piece: _Arriving) -> None:
        piece.work.wait()
        there = self.memory.view(piece.region)
        arrived = there if piece.landing is None else piece.landing
        self._note(self.log.received, piece.run, piece.offset, arrived)
        if piece.landing is not None:
            self._let_go(piece.region)
            _put(there, piece.landing, add=piece.run.send.add)
            self._spare[piece.landing.numel()].append(piece.landing)

    def _let_go(self, region: Region | None) -> None:
        """Wait until no send reads `region` any more; None: anything."""
        still = []
        for place, work in self._leaving:
            if region is None or place.meets(region):
                work.wait()
            else:
                still.append((place, work))
        self._leaving = still

    def _take(self, numel: int) -> torch.Tensor:
        """Return memory where a piece can land; what was used last is in the caches still."""
        spare = self._spare[numel]
        return spare.pop() if spare else torch.empty_like(self.memory.tensors[0][:numel])


def _confirmed(schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Return by round the messages (src, dst) after which their sender turns to somebody else."""
    targets: dict[int, dict[int, set[int]]] = defaultdict(dict)  # of each sender: round → receivers
    for number, sends in enumerate(schedule.rounds):
        for send in sends:
            targets[send.src].setdefault(number, set()).add(send.dst)
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for src, of_round in targets.items():
        for (number, now), (_, then) in pairwise(sorted(of_round.items())):
            if then - now:
                found[number] += [(src, dst) for dst in sorted(now)]
    return found


def _put(there: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
    there.add_(arrived) if add else there.copy_(arrived)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, for a checksum."""
    return tensor.cpu().view(torch.uint8).numpy().data
