"""One flat buffer summed over all ranks, sent as the packets of a codec: small bytes really move.

    swap      every other rank's part of the buffer is compressed and sent to it, with this rank's weight beside it
    sum       of its own part each rank adds up what came, in float32; its own numbers count as they are
    publish   the sum is compressed once more and sent to all
    fill      everybody decompresses the same packets, so the result is the same to the bit on all ranks

That moves (N-1)/N of the packets' bytes twice over each rank's link, as a ring all-reduce of so few bytes would.

With error feedback both compressions remember what they left out (Tang et al., DoubleSqueeze, arXiv 1905.05957). One
residual is enough for both: a rank compresses the parts of others before the swap, and its own part after the sum.

[Note: sparse sums] The sum of sparse packets has other indices than each, and would have to be thinned once more. So
`AllGatherReduce` sends every rank's packet to all, and each rank adds up all of them, in the order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.compression.codecs import Codec
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.exchange_thread import ExchangeThread, PendingExchange
from paceline.parallel.engine.comm import Comm, PendingCollective

__all__ = [
    "COUNTS_ONCE",
    "AllGatherReduce",
    "AllToAllReduce",
    "CompressedReduce",
    "CompressionLoss",
    "PacketHeader",
]

_LABEL_NBYTES = 32
"""Behind each packet: its sender's label, four float64."""


@dataclass(frozen=True)
class PacketHeader:
    """What a rank says beside its numbers.

    Attributes:
        weight: how much they count. note: of the caller's own. rate: another one.
    """

    weight: float = 1.0
    note: float = 0.0
    rate: float = 0.0

    def write(self, place: Tensor) -> None:
        """Put it into bytes."""
        place.view(torch.float64).copy_(
            torch.tensor([self.weight, self.note, self.rate, 0.0], dtype=torch.float64)
        )

    @classmethod
    def read(cls, rows: Tensor) -> list[PacketHeader]:
        """Return the labels that rows of bytes hold."""
        return [cls(*numbers[:3]) for numbers in rows.contiguous().view(torch.float64).tolist()]


COUNTS_ONCE = PacketHeader()
"""Of a sum whose ranks all count alike."""


@dataclass
class CompressionLoss:
    """How far what was sent is from what was to be sent, as sums of squares of this rank's own compressions."""

    left_out: float = 0.0
    given: float = 0.0

    def add(self, left: Tensor, decoded: Tensor) -> None:
        """Count a packet: what it left out, and what it says (overwritten)."""
        self.left_out += float(torch.linalg.vector_norm(left)) ** 2
        self.given += float(torch.linalg.vector_norm(decoded.add_(left))) ** 2

    @property
    def relative(self) -> float:
        """‖x − D(C(x))‖ / ‖x‖; NaN where nothing was given."""
        return math.sqrt(self.left_out / self.given) if self.given else math.nan


class CompressedReduce(Protocol):
    """A buffer that can be summed again and again.

    Attributes:
        sent_nbytes: what one sum has this rank send, headers of the network aside.
        error: of the latest sum that was launched with ``measure=True``.
        labels: of each rank, in the latest sum.
    """

    sent_nbytes: int
    error: CompressionLoss
    labels: list[PacketHeader]

    def launch(self, label: PacketHeader = COUNTS_ONCE, *, measure: bool = False) -> None:
        """Start summing the buffer times its weight over all ranks; until `wait`, nobody may write to it."""
        ...

    def wait(self) -> None:
        """Block until the buffer holds the sum."""
        ...


class _Packer:
    """Compresses parts of a buffer on this rank, with or without error feedback."""

    def __init__(self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None) -> None:
        self.flat, self.codec, self.feedback = flat, codec, feedback
        self.error: CompressionLoss | None = None
        # Codecs read float32 (the raw one also float64); gradients that are kept in less are widened here.
        low = flat.dtype in (torch.bfloat16, torch.float16)
        self.wide = torch.empty_like(flat, dtype=torch.float32) if low else flat

    def begin(self, measure: bool) -> None:
        """Take up what is in the buffer now."""
        self.error = CompressionLoss() if measure else None
        if self.wide is not self.flat:
            self.wide.copy_(self.flat)

    def end(self) -> None:
        """Put the result back."""
        if self.wide is not self.flat:
            self.flat.copy_(self.wide)

    def pack(self, start: int, stop: int, packet: Tensor, *, counts: bool = True) -> None:
        """Write the packet of elements `start` to `stop`; one that nobody counts is of zeros, and pays back nothing."""
        values = self.wide[start:stop]
        with _on(values.device, packet) as own:
            if not counts:
                self.codec.compress(torch.zeros_like(values), own, None)
                return
            if self.feedback is not None:
                self.feedback.compress(values, own, start)
                left = self.feedback.residual[start:stop]
            else:
                left = torch.empty_like(values) if self.error is not None else None
                self.codec.compress(values, own, left)
            if self.error is not None and left is not None:
                self.error.add(left, self._decoded(own, values))

    def _decoded(self, packet: Tensor, like: Tensor) -> Tensor:
        decoded = torch.empty_like(like)
        self.codec.decompress(packet, decoded)
        return decoded

    def unpack(self, packet: Tensor, start: int, stop: int) -> None:
        """Fill elements `start` to `stop` from a packet."""
        self.codec.decompress(packet.to(self.wide.device), self.wide[start:stop])

    def add(self, packet: Tensor, start: int, stop: int, weight: float) -> None:
        """Add a packet times `weight` to elements `start` to `stop`."""
        self.codec.add(packet.to(self.wide.device), self.wide[start:stop], weight)


@contextmanager
def _on(device: torch.device, packet: Tensor) -> Iterator[Tensor]:
    """Give `packet`, or where it is on another device a stand-in that is copied there afterwards."""
    if packet.device == device:
        yield packet
        return
    own = torch.empty_like(packet, device=device)
    yield own
    packet.copy_(own)


class AllToAllReduce:
    """A buffer that is summed in two stages; all ranks make theirs in the same order.

    Args:
        comm: the ranks, two or more.
        flat: the buffer, 1-D; its length divides into one part for each rank.
        codec: makes the packets.
        courier: does the second stage.
        feedback: of the whole buffer; None: what compression leaves out is lost.
        mean: divide by the sum of the weights, where that is not 0.
        scatter: leave each rank with the sum of its own part; the rest of its buffer then means nothing.
        tag: the first of two that were reserved; None: reserve them.
    """

    def __init__(
        self,
        comm: Comm,
        flat: Tensor,
        codec: Codec,
        courier: ExchangeThread,
        feedback: ErrorFeedback | None = None,
        *,
        mean: bool = False,
        scatter: bool = False,
        tag: int | None = None,
    ) -> None:
        self._comm, self._courier = comm, courier
        self._mean, self._scatter = mean, scatter
        self._packer = _Packer(flat, codec, feedback)
        self._part = flat.numel() // comm.size
        self._body = codec.nbytes(self._part)
        device = flat.device if comm.stream_ordered else torch.device("cpu")
        rows = [comm.size, self._body + _LABEL_NBYTES]
        self._outgoing = torch.zeros(rows, dtype=torch.uint8, device=device)
        self._incoming = torch.zeros(rows, dtype=torch.uint8, device=device)
        self._sums = torch.zeros(0 if scatter else comm.size, self._body, dtype=torch.uint8, device=device)
        self._tag = comm.reserve_tags(2) if tag is None else tag
        self._ticket: PendingExchange | None = None
        self._gathering: PendingCollective | None = None
        self.sent_nbytes = (comm.size - 1) * (rows[1] + (0 if scatter else self._body))
        self.error = CompressionLoss()
        self.labels: list[PacketHeader] = []

    def launch(self, label: PacketHeader = COUNTS_ONCE, *, measure: bool = False) -> None:
        """Start summing; see `CompressedReduce`."""
        assert self._ticket is None, "the sum before it was waited for"
        self._packer.begin(measure)
        label.write(self._incoming[self._comm.rank, self._body :])
        expected = [] if self._scatter else self._comm.post_row_receives(self._sums, self._tag + 1)

        def fill(rank: int) -> None:
            self._packer.pack(
                *self._span(rank), self._outgoing[rank, : self._body], counts=label.weight != 0.0
            )
            label.write(self._outgoing[rank, self._body :])

        swapping = self._comm.all_to_all_rows(self._outgoing, self._incoming, fill, self._tag)
        self._ticket = self._courier.give(lambda: self._sum_up(swapping, expected))

    def _span(self, rank: int) -> tuple[int, int]:
        return rank * self._part, (rank + 1) * self._part

    def _sum_up(self, swapping: PendingCollective, expected: list[dist.Work]) -> None:
        """Sum this rank's part of all ranks, and send it on."""
        swapping.wait()
        rank, packer = self._comm.rank, self._packer
        self.labels = PacketHeader.read(self._incoming[:, self._body :])
        weights = [label.weight for label in self.labels]
        start, stop = self._span(rank)
        own = packer.wide[start:stop]
        if weights[rank] == 0.0:
            own.zero_()  # whatever it is, a NaN too
        elif weights[rank] != 1.0:
            own.mul_(weights[rank])
        for peer in self._comm.peers:
            if weights[peer] != 0.0:
                packer.add(self._incoming[peer, : self._body], start, stop, weights[peer])
        total = sum(weights)
        if self._mean and total not in (0.0, 1.0):
            own.div_(total)
        if not self._scatter:
            packer.pack(start, stop, self._sums[rank], counts=total != 0.0)
            self._gathering = self._comm.all_gather_rows(self._sums, expected, self._tag + 1)

    def wait(self) -> None:
        """Block until the buffer holds the sum; see `CompressedReduce`."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        ticket.wait()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            for rank in range(self._comm.size):
                self._packer.unpack(self._sums[rank], *self._span(rank))
        self._packer.end()
        if self._packer.error is not None:
            self.error = self._packer.error


class AllGatherReduce:
    """A buffer whose packets all ranks send to all; see [Note: sparse sums].

    Args:
        wire, flat, codec, feedback: as for `AllToAllReduce`; the buffer may have any length.
        tag: that was reserved; None: reserve one.
    """

    def __init__(
        self,
        comm: Comm,
        flat: Tensor,
        codec: Codec,
        feedback: ErrorFeedback | None = None,
        tag: int | None = None,
    ) -> None:
        self._comm, self._packer = comm, _Packer(flat, codec, feedback)
        body = codec.nbytes(flat.numel())
        device = flat.device if comm.stream_ordered else torch.device("cpu")
        self._rows = torch.zeros(comm.size, body + _LABEL_NBYTES, dtype=torch.uint8, device=device)
        self._body = body
        self._tag = comm.reserve_tags(1) if tag is None else tag
        self._gathering: PendingCollective | None = None
        self.sent_nbytes = (comm.size - 1) * (body + _LABEL_NBYTES)
        self.error = CompressionLoss()
        self.labels: list[PacketHeader] = []

    def launch(self, label: PacketHeader = COUNTS_ONCE, *, measure: bool = False) -> None:
        """Start summing; see `CompressedReduce`."""
        assert self._gathering is None, "the sum before it was waited for"
        self._packer.begin(measure)
        expected = self._comm.post_row_receives(self._rows, self._tag)
        mine = self._rows[self._comm.rank]
        self._packer.pack(0, self._packer.flat.numel(), mine[: self._body])
        label.write(mine[self._body :])
        self._gathering = self._comm.all_gather_rows(self._rows, expected, self._tag)

    def wait(self) -> None:
        """Block until the buffer holds the sum; see `CompressedReduce`."""
        if self._gathering is None:
            return
        self._gathering.wait()
        self._gathering = None
        packer = self._packer
        self.labels = PacketHeader.read(self._rows[:, self._body :])
        packer.wide.zero_()
        for row, label in zip(self._rows, self.labels, strict=True):
            if label.weight != 0.0:
                packer.add(row[: self._body], 0, packer.flat.numel(), label.weight)
        packer.end()
        if packer.error is not None:
            self.error = packer.error
