"""Carrying out the rounds of a schedule as one rank: piece by piece, or round by round.

[Note: streaming] A run of chunks travels in pieces. A rank posts the receives of a round, then starts the round's
sends piece by piece; for each it first waits for what that piece needs, and no more: the receives of earlier rounds
that meet it. So while one piece of a ring is added, the one before is on its way to the next rank already, and the
wire never waits for a round to end. Whatever is written waits first for the sends that still read it. What is waited
for belongs to this round or an earlier one, so ranks cannot wait in a circle.

[Note: lockstep] NCCL's sends and receives between two ranks block each other unless they are started together, so
there a round is one batch, waited for as a whole. It is also the plain version that tests hold the other against.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import xxhash

from paceline.collectives.memory import Memory, Region
from paceline.collectives.receipts import Log, Note
from paceline.collectives.schedule import Schedule, Send

__all__ = ["Lockstep", "Streaming"]

_TAG = 61_000  # of all messages: between two ranks they are taken in the order in which they were sent


@dataclass(eq=False)
class _Run:
    """A run of chunks at one of its ends: what of it has gone or come."""

    number: int
    send: Send
    left: int  # elements
    nbytes: int = 0
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)


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
        memory: Memory,
        group: dist.ProcessGroup | None,
        segment_nbytes: int,
        checksums: bool,
    ) -> None:
        self.schedule, self.memory, self.group = schedule, memory, group
        self.rank = memory.rank
        self.most = max(1, segment_nbytes // memory.tensors[0].element_size())  # elements of a piece
        self.checksums = checksums
        self.log = Log()
        self.began = time.perf_counter()

    def finished_log(self, *, failed: bool = False) -> Log:
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

    def _note(self, notes: list[Note], run: _Run, piece: torch.Tensor) -> None:
        """Count a piece of a run that goes or has come; with the last one the run is noted."""
        if not self.checksums:
            return
        run.digest.update(_bytes(piece))
        run.nbytes += piece.nbytes
        run.left -= piece.numel()
        if not run.left:
            src, dst, chunk = run.send[:3]
            seconds = time.perf_counter() - self.began
            notes.append(Note(run.number, src, dst, chunk, run.nbytes, run.digest.intdigest(), seconds))


class Lockstep(_Carrier):
    """Round by round, see [Note: lockstep]."""

    def carry(self) -> None:
        """Carry out all rounds."""
        for number, sends in enumerate(self.schedule.rounds):
            calls, arriving = [], []
            for send in sends:
                run = self._run(number, send)
                for region in self.memory.regions(send) if self.rank in send[:2] else []:
                    data = self.memory.view(region)
                    if send.src == self.rank:
                        self._note(self.log.sent, run, data)
                        calls.append(dist.P2POp(dist.isend, data, self._peer(send.dst), self.group, _TAG))
                    else:
                        fresh = torch.empty_like(data)
                        arriving.append((run, data, fresh))
                        calls.append(dist.P2POp(dist.irecv, fresh, self._peer(send.src), self.group, _TAG))
            for work in dist.batch_isend_irecv(calls) if calls else []:
                work.wait()
            for run, data, fresh in arriving:
                self._note(self.log.received, run, fresh)
                _put(data, fresh, add=run.send.add)


@dataclass(eq=False)
class _Arriving:
    """A piece that was asked for: where it goes, and where it lands if that is somewhere else."""

    run: _Run
    region: Region
    work: dist.Work
    landing: torch.Tensor | None


class Streaming(_Carrier):
    """Piece by piece, see [Note: streaming]."""

    def carry(self) -> None:
        """Carry out all rounds."""
        self._arriving: list[_Arriving] = []
        self._leaving: list[tuple[Region, dist.Work]] = []
        self._spare: dict[int, list[torch.Tensor]] = defaultdict(list)  # by number of elements
        for number, sends in enumerate(self.schedule.rounds):
            out = [send for send in sends if send.src == self.rank]
            read_now = [region for send in out for region in self.memory.regions(send)]
            for send in sends:
                if send.dst == self.rank:
                    self._ask(self._run(number, send), read_now)
            for send in out:
                self._send(self._run(number, send))
        self._settle(None)
        self._let_go(None)

    def _ask(self, run: _Run, read_now: list[Region]) -> None:
        """Post the receives of a run: where it belongs, unless it is added or this round still reads there."""
        for whole in self.memory.regions(run.send):
            aside = run.send.add or any(whole.meets(region) for region in read_now)
            for region in whole.pieces(self.most):
                if aside:
                    landing = self._take(region.end - region.begin)
                else:
                    self._settle(region)
                    self._let_go(region)
                    landing = None
                data = self.memory.view(region) if landing is None else landing
                work = dist.irecv(data, self._peer(run.send.src), self.group, _TAG)
                assert work is not None, "this rank is in the group"
                self._arriving.append(_Arriving(run, region, work, landing))

    def _send(self, run: _Run) -> None:
        """Start a run's sends, each piece as soon as it is complete."""
        for whole in self.memory.regions(run.send):
            for region in whole.pieces(self.most):
                self._settle(region, before=run.number)
                data = self.memory.view(region)
                self._note(self.log.sent, run, data)
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

    def _take_in(self, piece: _Arriving) -> None:
        piece.work.wait()
        there = self.memory.view(piece.region)
        self._note(self.log.received, piece.run, there if piece.landing is None else piece.landing)
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


def _put(there: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
    there.add_(arrived) if add else there.copy_(arrived)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, for a checksum."""
    return tensor.cpu().view(torch.uint8).numpy().data
