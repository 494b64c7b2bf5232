"""All-reduce of one flat buffer in a codec's packets, so that only compressed bytes cross the network.

    swap      each rank compresses every other rank's part of the buffer and sends it there, with its weight
    sum       each rank adds up the packets of its own part, in float32; its own numbers enter uncompressed
    publish   the sum is compressed once more and sent to all
    fill      all ranks decompress the same packets, so the result is bitwise the same everywhere

Each rank's link carries (N-1)/N of the packets' bytes twice, as in a ring all-reduce of so few bytes.

With error feedback both compressions keep what they leave out (Tang et al., DoubleSqueeze, arXiv 1905.05957). One
residual serves both: a rank compresses the parts of others before the swap, and its own part after the sum.

[Note: sparse sums] The sum of sparse packets has other indices than each packet, and would have to be thinned once
more. So `AllGatherReduce` sends every packet to all ranks, and each rank adds up all of them in rank order.
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
from paceline.parallel.gradient_collectives import Comm, PendingCollective

__all__ = [
    "UNWEIGHTED",
    "AllGatherReduce",
    "AllToAllReduce",
    "CompressedReduce",
    "CompressionLoss",
    "PacketHeader",
]

_HEADER_NBYTES = 32
"""Behind each packet: the header of its sender, four float64."""


@dataclass(frozen=True)
class PacketHeader:
    """What a rank sends along with its numbers.

    Attributes:
        weight: of the numbers in the sum.
        flags: bits, for the caller.
        inner_lr: learning rate, for the caller.
    """

    weight: float = 1.0
    flags: int = 0
    inner_lr: float = 0.0

    def write(self, place: Tensor) -> None:
        """Write it to `place`, as bytes."""
        numbers = [self.weight, float(self.flags), self.inner_lr, 0.0]
        place.view(torch.float64).copy_(torch.tensor(numbers, dtype=torch.float64))

    @classmethod
    def read(cls, rows: Tensor) -> list[PacketHeader]:
        """Return the headers that rows of bytes hold."""
        numbers = rows.contiguous().view(torch.float64).tolist()
        return [cls(weight, int(flags), inner_lr) for weight, flags, inner_lr, _ in numbers]


UNWEIGHTED = PacketHeader()
"""Header of reductions in which all ranks count the same."""


@dataclass
class CompressionLoss:
    """Difference between sent and given numbers, as sums of squares over this rank's compressions."""

    left_out: float = 0.0
    given: float = 0.0

    def add(self, left: Tensor, decoded: Tensor) -> None:
        """Add a packet: its error, and the numbers it decompresses to (overwritten)."""
        self.left_out += float(torch.linalg.vector_norm(left)) ** 2
        self.given += float(torch.linalg.vector_norm(decoded.add_(left))) ** 2

    @property
    def relative(self) -> float:
        """‖x − D(C(x))‖ / ‖x‖; NaN if nothing was given."""
        return math.sqrt(self.left_out / self.given) if self.given else math.nan


class CompressedReduce(Protocol):
    """A buffer that is reduced again and again.

    Attributes:
        calls: collectives per reduction.
        sent_nbytes: bytes this rank sends per reduction, network headers excluded.
        loss: of the latest reduction launched with ``measure=True``.
        headers: of all ranks, in the latest reduction.
    """

    calls: int
    sent_nbytes: int
    loss: CompressionLoss
    headers: list[PacketHeader]

    def launch(self, header: PacketHeader = UNWEIGHTED, *, measure: bool = False) -> None:
        """Start summing the buffer times its weight over all ranks; don't write to it until `wait` returns."""
        ...

    def wait(self) -> None:
        """Block until the buffer holds the sum."""
        ...


class _BufferCodec:
    """Compresses parts of a buffer, with or without error feedback."""

    def __init__(self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None) -> None:
        self.flat, self.codec, self.feedback = flat, codec, feedback
        self.loss: CompressionLoss | None = None
        # Codecs read float32 (the raw one also float64); gradients kept in less are widened here.
        low = flat.dtype in (torch.bfloat16, torch.float16)
        self.wide = torch.empty_like(flat, dtype=torch.float32) if low else flat

    def read_buffer(self, measure: bool) -> None:
        """Start from what the buffer holds now."""
        self.loss = CompressionLoss() if measure else None
        if self.wide is not self.flat:
            self.wide.copy_(self.flat)

    def write_buffer(self) -> None:
        """Write the result to the buffer."""
        if self.wide is not self.flat:
            self.flat.copy_(self.wide)

    def pack(self, start: int, stop: int, packet: Tensor, *, counts: bool = True) -> None:
        """Write the packet of elements `start` to `stop`; of zeros, without feedback, unless it counts."""
        values = self.wide[start:stop]
        with _on_device(values.device, packet) as own:
            if not counts:
                self.codec.compress(torch.zeros_like(values), own, None)
                return
            if self.feedback is not None:
                self.feedback.compress(values, own, start)
                left = self.feedback.residual[start:stop]
            else:
                left = torch.empty_like(values) if self.loss is not None else None
                self.codec.compress(values, own, left)
            if self.loss is not None and left is not None:
                decoded = torch.empty_like(values)
                self.codec.decompress(own, decoded)
                self.loss.add(left, decoded)

    def unpack(self, packet: Tensor, start: int, stop: int) -> None:
        """Fill elements `start` to `stop` from a packet."""
        self.codec.decompress(packet.to(self.wide.device), self.wide[start:stop])

    def add(self, packet: Tensor, start: int, stop: int, weight: float) -> None:
        """Add a packet times `weight` to elements `start` to `stop`."""
        self.codec.add(packet.to(self.wide.device), self.wide[start:stop], weight)


@contextmanager
def _on_device(device: torch.device, packet: Tensor) -> Iterator[Tensor]:
    """Yield `packet`, or if it is on another device a buffer that is copied to it afterwards."""
    if packet.device == device:
        yield packet
        return
    own = torch.empty_like(packet, device=device)
    yield own
    packet.copy_(own)


class AllToAllReduce:
    """Two-stage reduction of a buffer; all ranks create theirs in the same order.

    Args:
        comm: the ranks, two or more.
        flat: the buffer, 1-D, of a length that divides into one part per rank.
        codec: makes the packets.
        exchange_thread: runs the second stage.
        feedback: for the whole buffer; None: compression errors are lost.
        mean: divide by the sum of the weights, unless that is 0.
        scatter: leave each rank with the sum of its own part only; the rest of its buffer is undefined.
        tag: the first of two reserved tags; None: reserve them.
    """

    def __init__(
        self,
        comm: Comm,
        flat: Tensor,
        codec: Codec,
        exchange_thread: ExchangeThread,
        feedback: ErrorFeedback | None = None,
        *,
        mean: bool = False,
        scatter: bool = False,
        tag: int | None = None,
    ) -> None:
        self._comm, self._exchange_thread = comm, exchange_thread
        self._mean, self._scatter = mean, scatter
        self._buffer = _BufferCodec(flat, codec, feedback)
        self._part = flat.numel() // comm.size
        self._body = codec.nbytes(self._part)
        device = flat.device if comm.stream_ordered else torch.device("cpu")
        rows = [comm.size, self._body + _HEADER_NBYTES]
        self._outgoing = torch.zeros(rows, dtype=torch.uint8, device=device)
        self._incoming = torch.zeros(rows, dtype=torch.uint8, device=device)
        self._sums = torch.zeros(0 if scatter else comm.size, self._body, dtype=torch.uint8, device=device)
        self._tag = comm.reserve_tags(2) if tag is None else tag
        self._pending: PendingExchange | None = None
        self._gathering: PendingCollective | None = None
        self.calls = 1 if scatter else 2
        self.sent_nbytes = (comm.size - 1) * (rows[1] + (0 if scatter else self._body))
        self.loss = CompressionLoss()
        self.headers: list[PacketHeader] = []

    def launch(self, header: PacketHeader = UNWEIGHTED, *, measure: bool = False) -> None:
        assert self._pending is None, "the previous reduction was not waited for"
        self._buffer.read_buffer(measure)
        header.write(self._incoming[self._comm.rank, self._body :])
        expected = [] if self._scatter else self._comm.post_row_receives(self._sums, self._tag + 1)

        def fill(rank: int) -> None:
            packet = self._outgoing[rank, : self._body]
            self._buffer.pack(*self._span(rank), packet, counts=header.weight != 0.0)
            header.write(self._outgoing[rank, self._body :])

        swapping = self._comm.all_to_all_rows(self._outgoing, self._incoming, fill, self._tag)
        self._pending = self._exchange_thread.submit(lambda: self._reduce(swapping, expected))

    def _span(self, rank: int) -> tuple[int, int]:
        return rank * self._part, (rank + 1) * self._part

    def _reduce(self, swapping: PendingCollective, expected: list[dist.Work]) -> None:
        """Sum this rank's part over all ranks, and publish it."""
        swapping.wait()
        rank, buffer = self._comm.rank, self._buffer
        self.headers = PacketHeader.read(self._incoming[:, self._body :])
        weights = [header.weight for header in self.headers]
        start, stop = self._span(rank)
        own = buffer.wide[start:stop]
        if weights[rank] == 0.0:
            own.zero_()  # whatever it holds, NaN too
        elif weights[rank] != 1.0:
            own.mul_(weights[rank])
        for peer in self._comm.peers:
            if weights[peer] != 0.0:
                buffer.add(self._incoming[peer, : self._body], start, stop, weights[peer])
        total = sum(weights)
        if self._mean and total not in (0.0, 1.0):
            own.div_(total)
        if not self._scatter:
            buffer.pack(start, stop, self._sums[rank], counts=total != 0.0)
            self._gathering = self._comm.all_gather_rows(self._sums, expected, self._tag + 1)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            for rank in range(self._comm.size):
                self._buffer.unpack(self._sums[rank], *self._span(rank))
        self._buffer.write_buffer()
        if self._buffer.loss is not None:
            self.loss = self._buffer.loss


class AllGatherReduce:
    """Reduction in which every rank sends its packet to all; see [Note: sparse sums].

    Args:
        comm: the ranks, two or more.
        flat: the buffer, 1-D, of any length.
        codec: makes the packets.
        feedback: for the whole buffer; None: compression errors are lost.
        tag: a reserved tag.
    """

    def __init__(
        self, comm: Comm, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None, tag: int
    ) -> None:
        self._comm, self._buffer = comm, _BufferCodec(flat, codec, feedback)
        self._body = codec.nbytes(flat.numel())
        device = flat.device if comm.stream_ordered else torch.device("cpu")
        self._rows = torch.zeros(comm.size, self._body + _HEADER_NBYTES, dtype=torch.uint8, device=device)
        self._tag = tag
        self._gathering: PendingCollective | None = None
        self.calls = 1
        self.sent_nbytes = (comm.size - 1) * (self._body + _HEADER_NBYTES)
        self.loss = CompressionLoss()
        self.headers: list[PacketHeader] = []

    def launch(self, header: PacketHeader = UNWEIGHTED, *, measure: bool = False) -> None:
        assert self._gathering is None, "the previous reduction was not waited for"
        self._buffer.read_buffer(measure)
        expected = self._comm.post_row_receives(self._rows, self._tag)
        own = self._rows[self._comm.rank]
        self._buffer.pack(0, self._buffer.flat.numel(), own[: self._body])
        header.write(own[self._body :])
        self._gathering = self._comm.all_gather_rows(self._rows, expected, self._tag)

    def wait(self) -> None:
        if self._gathering is None:
            return
        self._gathering.wait()
        self._gathering = None
        buffer = self._buffer
        self.headers = PacketHeader.read(self._rows[:, self._body :])
        buffer.wide.zero_()
        for row, header in zip(self._rows, self.headers, strict=True):
            if header.weight != 0.0:
                buffer.add(row[: self._body], 0, buffer.flat.numel(), header.weight)
        buffer.write_buffer()
        if buffer.loss is not None:
            self.loss = buffer.loss
