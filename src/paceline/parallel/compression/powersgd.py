"""PowerSGD: low-rank approximation of gradient matrices, and the all-reduce of a bucket of them.

Vogels et al., arXiv 1905.13727, algorithm 1, for the matrices M of one bucket, with collectives in between::

    launch            M ← gradients + residual;  P ← M Q;  start summing P
    exchange thread   P ← orthogonalise(sum of P);  Q ← Mᵀ P;  residual ← M − P Qᵀ;  start summing Q
    wait              the sum of all ranks' gradients is about P Qᵀ

All P of a bucket lie in one buffer and all Q in another, so a bucket takes two sums, always in the same order. Every
bucket has its own messages, so it does not matter whose second sum starts first on which rank. Q is kept for the next
step: M changes slowly, so each step continues the power iteration of the previous ones.

[Note: one P] Every rank orthogonalises the same summed P. Equal bytes, equally aligned, give equal bytes on processors
of one kind; processors of two kinds may differ in the last bits, and with them the results. So each rank publishes its
own part of the orthogonal P, and all ranks use the parts of all. The first Q is drawn as uniform numbers, which need no
library's sine or logarithm.

[Note: Qᵀ] Q is stored transposed, rank × columns: both products with M then read M along its rows, which is much faster
on a CPU than ``M.T @ P``.

[Note: rank deficient] Householder's QR gives orthonormal columns for any P, also if its rank is less than its columns
or it is zero. So a Q that became zero (a step without gradient) recovers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.compression.buffer_codec import CompressionLoss, sum_of_squares
from paceline.parallel.compression.codecs import RawCodec
from paceline.parallel.compression.compressed_allreduce import AllToAllReduce
from paceline.parallel.compression.exchange_thread import ExchangeThread, PendingExchange
from paceline.parallel.compression.packet_header import UNWEIGHTED, PacketHeader
from paceline.parallel.gradient_collectives import Comm
from paceline.world.accelerator import host_buffer

__all__ = ["TAGS", "LowRankFactors", "PowerSGDAllReduce", "as_matrix", "worth_factoring"]

TAGS = 5
"""Tags of one `PowerSGDAllReduce`."""


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a view of shape [shape[0], everything else]."""
    return tensor.view(tensor.shape[0], -1)


def worth_factoring(shape: Sequence[int], rank: int) -> bool:
    """Return whether P and Q of a tensor have less than half of its numbers.

    Raises:
        UsageError: a rank below 1.

    Example:
        >>> worth_factoring((64, 3, 5, 5), rank=2), worth_factoring((64,), rank=2)
        (True, False)
    """
    if rank < 1:
        raise UsageError(f"rank={rank}", remedy="use a rank of 1 or more")
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return rows * columns > 2 * (rows + columns) * min(rank, rows, columns)


class LowRankFactors:
    """P and Q of the matrices of one bucket, packed, and the arithmetic of PowerSGD; sends nothing.

    Call `project`, `orthogonalise`, `project_back`, `reconstruct` in this order, with the sums over ranks in between.

    Args:
        shapes: of the tensors; all are `worth_factoring`.
        rank: columns of P and Q; fewer for a matrix with fewer rows or columns.
        seed: of the first Q; the same on all ranks.
        device: of the tensors.

    Attributes:
        p, q: the packed buffers, float32.
        pairs: per tensor, its P [rows, rank] and its Qᵀ [rank, columns], as views into them.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        rank: int = 4,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = [(shape[0], math.prod(shape[1:])) for shape in shapes]
        ranks = [min(rank, rows, columns) for rows, columns in sizes]
        p_numels = [rows * kept for (rows, _), kept in zip(sizes, ranks, strict=True)]
        q_numels = [columns * kept for (_, columns), kept in zip(sizes, ranks, strict=True)]
        generator = torch.Generator().manual_seed(seed)
        first = torch.rand(sum(q_numels), generator=generator).mul_(2).sub_(1)
        self._first = _copied(first, torch.device(device))
        self.q = self._first.clone()
        self.p = torch.zeros(sum(p_numels), dtype=torch.float32, device=device)
        parts = zip(self.p.split(p_numels), self.q.split(q_numels), ranks, strict=True)
        self.pairs = [(p.view(-1, kept), q.view(kept, -1)) for p, q, kept in parts]

    @torch.no_grad()
    def project(self, tensors: Sequence[Tensor]) -> Tensor:
        """Write P = M Q and return all of it, packed. Non-finite numbers of Q are replaced by those of the first Q."""
        torch.where(self.q.isfinite(), self.q, self._first, out=self.q)
        for tensor, (p, q) in zip(tensors, self.pairs, strict=True):
            torch.mm(as_matrix(tensor), q.t(), out=p)
        return self.p

    @torch.no_grad()
    def orthogonalise(self) -> None:
        """Replace each P by an orthonormal basis of its column space; see [Note: rank deficient]."""
        for p, _ in self.pairs:
            p.copy_(torch.linalg.qr(p).Q)

    @torch.no_grad()
    def project_back(self, tensors: Sequence[Tensor]) -> Tensor:
        """Write Q = Mᵀ P and return all of it, packed; see [Note: Qᵀ]."""
        for tensor, (p, q) in zip(tensors, self.pairs, strict=True):
            torch.mm(p.t(), as_matrix(tensor), out=q)
        return self.q

    @torch.no_grad()
    def reconstruct(self, into: Sequence[Tensor]) -> None:
        """Write M̂ = P Qᵀ."""
        for tensor, (p, q) in zip(into, self.pairs, strict=True):
            torch.mm(p, q, out=as_matrix(tensor))


class PowerSGDAllReduce:
    """Reduction of a buffer of matrices as low-rank products; all ranks create theirs in the same order.

    Args:
        comm: the ranks, two or more.
        flat: the buffer.
        views: returns the matrices of a buffer laid out like `flat`.
        shapes: of the matrices; all are `worth_factoring`.
        exchange_thread: runs the second stage.
        rank: of the products.
        seed: of the first Q.
        residual: float32, laid out like `flat`, for what is left out; None: it is lost.
        tag: the first of `TAGS` reserved tags.
    """

    def __init__(
        self,
        comm: Comm,
        flat: Tensor,
        views: Callable[[Tensor], Sequence[Tensor]],
        shapes: Sequence[Sequence[int]],
        exchange_thread: ExchangeThread,
        *,
        rank: int,
        seed: int,
        residual: Tensor | None,
        tag: int,
    ) -> None:
        self._comm, self._exchange_thread, self._flat, self._views = comm, exchange_thread, flat, views
        self._residual = residual
        self._given = torch.zeros_like(flat, dtype=torch.float32) if residual is None else residual
        self.factors = LowRankFactors(shapes, rank, seed=seed, device=flat.device)
        self._p, self._q = (_padded(each, comm.size) for each in (self.factors.p, self.factors.q))
        raw = RawCodec(torch.float32)
        self._sum_p = AllToAllReduce(comm, self._p, raw, exchange_thread, tag=tag)
        self._sum_q = AllToAllReduce(comm, self._q, raw, exchange_thread, tag=tag + 2)
        exchange_thread.keep(self._given, self.factors.p, self.factors.q)
        self._tag = tag + 4
        self._pending: PendingExchange | None = None
        self._measure = False
        self.calls = 5
        gathered = (comm.size - 1) * self._p.nbytes // comm.size
        self.sent_nbytes = self._sum_p.sent_nbytes + gathered + self._sum_q.sent_nbytes
        self.loss = CompressionLoss()

    @property
    def headers(self) -> list[PacketHeader]:
        return self._sum_p.headers

    def launch(self, header: PacketHeader = UNWEIGHTED, *, measure: bool = False) -> None:
        assert self._pending is None, "the previous reduction was not waited for"
        self._measure = measure
        if self._residual is None:
            self._given.copy_(self._flat)
        else:
            self._residual.add_(self._flat)
        if header.weight != 1.0:
            self._given.mul_(header.weight)
        p = self.factors.project(self._views(self._given))
        self._p[: p.numel()].copy_(p)
        self._sum_p.launch(
            header if header is UNWEIGHTED else PacketHeader(1.0, header.flags, header.inner_lr)
        )
        self._pending = self._exchange_thread.submit(self._start_second_sum)

    def _start_second_sum(self) -> None:
        self._sum_p.wait()
        factors, given = self.factors, self._views(self._given)
        p, q = factors.p, factors.q
        p.copy_(self._p[: p.numel()])
        factors.orthogonalise()
        self._p[: p.numel()].copy_(p)
        self._share(self._p)
        p.copy_(self._p[: p.numel()])
        self._q[: q.numel()].copy_(factors.project_back(given))
        self._subtract_sent()
        self._sum_q.launch()

    def _share(self, flat: Tensor) -> None:
        """Make `flat` the same on all ranks; see [Note: one P]."""
        rows = flat.view(self._comm.size, -1)
        staged = rows.device.type != "cpu" and not self._comm.stream_ordered
        sent = rows.cpu() if staged else rows
        self._comm.all_gather_rows(sent, self._comm.post_row_receives(sent, self._tag), self._tag).wait()
        if staged:
            rows.copy_(sent)

    def _subtract_sent(self) -> None:
        """Leave in the residual what is not sent; where that is not finite, nothing."""
        given = sum_of_squares(self._given) if self._measure else 0.0
        sent = torch.zeros_like(self._given)
        self.factors.reconstruct(self._views(sent))
        self._given.sub_(sent)
        on_host = self._given.device.type == "cpu"
        left = sum_of_squares(self._given) if self._measure or on_host else 0.0
        if not on_host or not left < float("inf"):
            self._given.nan_to_num_(0.0, 0.0, 0.0)
        if self._measure:
            self.loss = CompressionLoss(left, given)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        self._sum_q.wait()
        self.factors.q.copy_(self._q[: self.factors.q.numel()])
        if self._flat.dtype == torch.float32:
            self.factors.reconstruct(self._views(self._flat))
            return
        wide = torch.zeros_like(self._flat, dtype=torch.float32)
        self.factors.reconstruct(self._views(wide))
        self._flat.copy_(wide)


def _copied(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of values of the host on `device`, for which the host does not wait."""
    staged = host_buffer(values.shape, values.dtype, device).copy_(values)
    return staged.to(device, non_blocking=True)


def _padded(packed: Tensor, ranks: int) -> Tensor:
    """Return zeros for at least as many numbers, in parts of a multiple of 16 per rank."""
    return packed.new_zeros(-(-packed.numel() // (16 * ranks)) * 16 * ranks)
