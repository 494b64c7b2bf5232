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

[Note: on a device] Where calls are ordered on a stream of an accelerator the host waits for nothing. Headers stay
on the device: weights are scalars there, and what has weight 0 is masked instead of skipped. The packets for all peers
are made in two calls. The arithmetic is that of a CPU, in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.compression.buffer_codec import BufferCodec, CompressionLoss
from paceline.parallel.compression.codecs import Codec
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.exchange_thread import ExchangeThread, PendingExchange
from paceline.parallel.compression.packet_header import HEADER_NBYTES, UNWEIGHTED, PacketHeader
from paceline.parallel.gradient_collectives import Comm, PendingCollective
from paceline.world.accelerator import has_streams

__all__ = ["AllGatherReduce", "AllToAllReduce", "CompressedReduce"]


class CompressedReduce(Protocol):
    """A buffer that is reduced again and again.

    Attributes:
        calls: collectives per reduction.
        sent_nbytes: bytes this rank sends per reduction, network headers excluded.
        loss: of the latest reduction launched with ``measure=True``.
    """

    calls: int
    sent_nbytes: int
    loss: CompressionLoss

    @property
    def headers(self) -> list[PacketHeader]:
        """Headers of all ranks, in the latest reduction; on an accelerator reading them waits for it."""
        ...

    def launch(self, header: PacketHeader = UNWEIGHTED, *, measure: bool = False) -> None:
        """Start summing the buffer times its weight over all ranks; don't write to it until `wait` returns."""
        ...

    def wait(self) -> None:
        """Block until the buffer holds the sum (on an accelerator: order the current stream behind that)."""
        ...


def _header_columns(rows: Tensor) -> Tensor:
    """Return the headers of packets in rows, [ranks, bytes], as a view: float64, [ranks, 4]."""
    return rows[:, -HEADER_NBYTES:].view(torch.float64)


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

    Attributes:
        header_rows: headers of all ranks in the latest reduction, float64, [ranks, 4], where the packets are.
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
        self._on_device = comm.stream_ordered and has_streams(flat.device)
        self._mean, self._scatter = mean, scatter
        self._buffer = BufferCodec(flat, codec, feedback)
        self._part = flat.numel() // comm.size
        self._body = codec.nbytes(self._part)
        device = flat.device if comm.stream_ordered else torch.device("cpu")
        rows = [comm.size, self._body + HEADER_NBYTES]
        self._outgoing = torch.zeros(rows, dtype=torch.uint8, device=device)
        self._incoming = torch.zeros(rows, dtype=torch.uint8, device=device)
        self._sums = torch.zeros(0 if scatter else comm.size, self._body, dtype=torch.uint8, device=device)
        exchange_thread.keep(*self._buffer.memory, self._outgoing, self._incoming, self._sums)
        self.header_rows = _header_columns(self._incoming)
        self._written: PacketHeader | Tensor | None = None
        self._tag = comm.reserve_tags(2) if tag is None else tag
        self._pending: PendingExchange | None = None
        self._gathering: PendingCollective | None = None
        self.calls = 1 if scatter else 2
        self.sent_nbytes = (comm.size - 1) * (rows[1] + (0 if scatter else self._body))
        self.loss = CompressionLoss()
        self._headers: list[PacketHeader] | None = []

    @property
    def headers(self) -> list[PacketHeader]:
        if self._headers is None:
            self._headers = PacketHeader.read(self.header_rows)
        return self._headers

    def launch(self, header: PacketHeader | Tensor = UNWEIGHTED, *, measure: bool = False) -> None:
        """Start the reduction.

        Args:
            header: of this rank; where calls are ordered on a stream also as `header_row` returns it.
            measure: measure what compression leaves out.
        """
        assert self._pending is None, "the previous reduction was not waited for"
        self._buffer.read_buffer(measure)
        if header is not self._written:  # its bytes are in the rows still
            row = header.row(self._outgoing.device) if isinstance(header, PacketHeader) else header
            _header_columns(self._outgoing).copy_(row)
            self.header_rows[self._comm.rank].copy_(row)
            self._written = header
        expected = [] if self._scatter else self._comm.post_row_receives(self._sums, self._tag + 1)
        if self._on_device:
            swapping = self._swap_on_device(header)
            self._pending = self._exchange_thread.submit(
                lambda: self._reduce_on_device(swapping, weighted=header is not UNWEIGHTED)
            )
            return
        assert isinstance(header, PacketHeader), "tensors are for accelerators"

        def fill(rank: int) -> None:
            packet = self._outgoing[rank, : self._body]
            self._buffer.pack(*self._span(rank), packet, counts=header.weight != 0.0)

        swapping = self._comm.all_to_all_rows(self._outgoing, self._incoming, fill, self._tag)
        self._pending = self._exchange_thread.submit(lambda: self._reduce(swapping, expected))

    def _span(self, rank: int, last: int | None = None) -> tuple[int, int]:
        """Return start and stop of the part of a rank, or of the parts up to that of `last`, exclusive."""
        return rank * self._part, (rank + 1 if last is None else last) * self._part

    def _reduce(self, swapping: PendingCollective, expected: list[dist.Work]) -> None:
        """Sum this rank's part over all ranks, and publish it."""
        swapping.wait()
        rank, buffer = self._comm.rank, self._buffer
        self._headers = PacketHeader.read(self.header_rows)
        weights = [header.weight for header in self._headers]
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

    # ------------------------------------------------------------------ see [Note: on a device]

    @property
    def _peer_slices(self) -> list[tuple[int, int]]:
        """The ranks of `Comm.peers`, in that order, as first and last, exclusive."""
        rank, size = self._comm.rank, self._comm.size
        return [each for each in ((rank + 1, size), (0, rank)) if each[0] < each[1]]

    def _swap_on_device(self, header: PacketHeader | Tensor) -> PendingCollective:
        counts = header is UNWEIGHTED or self.header_rows[self._comm.rank, 0] != 0
        for first, last in self._peer_slices:
            packets = self._outgoing[first:last, : self._body]
            self._buffer.pack(*self._span(first, last), packets, counts=counts)
        return self._comm.all_to_all_rows(self._outgoing, self._incoming, lambda rank: None, self._tag)

    def _reduce_on_device(self, swapping: PendingCollective, *, weighted: bool) -> None:
        swapping.wait()
        comm, buffer = self._comm, self._buffer
        self._headers = None if weighted else [UNWEIGHTED] * comm.size
        weights = self.header_rows[:, 0] if weighted else None
        start, stop = self._span(comm.rank)
        own = buffer.wide[start:stop]
        if weights is not None:
            mine = weights[comm.rank]
            own.copy_(torch.where(mine != 0, own * mine, 0.0))
        for first, last in self._peer_slices:
            rows = None if weights is None else weights[first:last]
            buffer.add_rows(self._incoming[first:last, : self._body], start, stop, rows)
        counts: bool | Tensor = True
        divisor: float | Tensor = comm.size
        if weights is not None:
            total = weights.cumsum(0)[-1]
            counts, divisor = total != 0, torch.where(total != 0, total, 1.0)
        if self._mean:
            own.div_(divisor)
        if not self._scatter:
            buffer.pack(start, stop, self._sums[comm.rank], counts=counts)
            self._gathering = comm.all_gather_rows(self._sums, [], self._tag + 1)

    def wait(self) -> None:
        """Block until the buffer holds the sum (on an accelerator: order the current stream behind that)."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self._on_device:
                self._buffer.unpack(self._sums, *self._span(0, self._comm.size))
            else:
                for rank in range(self._comm.size):
                    self._buffer.unpack(self._sums[rank], *self._span(rank))
        self._buffer.write_buffer()
        if self._buffer.loss is not None:
            self.loss = self._buffer.loss


class AllGatherReduce:
    """Reduction in which every rank sends its packet to all; see [Note: sparse sums]. All ranks count the same.

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
        self._comm, self._buffer = comm, BufferCodec(flat, codec, feedback)
        self._on_device = comm.stream_ordered and has_streams(flat.device)
        self._body = codec.nbytes(flat.numel())
        device = flat.device if comm.stream_ordered else torch.device("cpu")
        self._rows = torch.zeros(comm.size, self._body + HEADER_NBYTES, dtype=torch.uint8, device=device)
        self._tag = tag
        self._gathering: PendingCollective | None = None
        self.calls = 1
        self.sent_nbytes = (comm.size - 1) * (self._body + HEADER_NBYTES)
        self.loss = CompressionLoss()
        self._headers: list[PacketHeader] | None = []
        self._weighted = False
        self._written: PacketHeader | None = None

    @property
    def headers(self) -> list[PacketHeader]:
        if self._headers is None:
            self._headers = PacketHeader.read(_header_columns(self._rows))
        return self._headers

    def launch(self, header: PacketHeader = UNWEIGHTED, *, measure: bool = False) -> None:
        assert self._gathering is None, "the previous reduction was not waited for"
        self._buffer.read_buffer(measure)
        self._weighted = header is not UNWEIGHTED
        expected = self._comm.post_row_receives(self._rows, self._tag)
        own = self._rows[self._comm.rank]
        self._buffer.pack(0, self._buffer.flat.numel(), own[: self._body])
        if header is not self._written:
            _header_columns(self._rows)[self._comm.rank].copy_(header.row(own.device))
            self._written = header
        self._gathering = self._comm.all_gather_rows(self._rows, expected, self._tag)

    def wait(self) -> None:
        if self._gathering is None:
            return
        self._gathering.wait()
        self._gathering = None
        buffer, numel = self._buffer, self._buffer.flat.numel()
        buffer.wide.zero_()
        if self._on_device:  # see [Note: on a device]
            headers = _header_columns(self._rows)
            self._headers = None if self._weighted else [UNWEIGHTED] * self._comm.size
            weights = headers[:, 0] if self._weighted else None
            buffer.add_rows(self._rows[:, : self._body], 0, numel, weights)
        else:
            self._headers = PacketHeader.read(_header_columns(self._rows))
            for row, header in zip(self._rows, self._headers, strict=True):
                if header.weight != 0.0:
                    buffer.add(row[: self._body], 0, numel, header.weight)
        buffer.write_buffer()
        if buffer.loss is not None:
            self.loss = buffer.loss
