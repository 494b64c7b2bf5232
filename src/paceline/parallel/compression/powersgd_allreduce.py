"""A bucket of matrices summed over all ranks as products of thin ones: PowerSGD's two sums, in one fixed order.

    launch    M ← gradients + what was left out before; P ← M Q; start summing P
    courier   P is there: orthogonalise it; Q ← Mᵀ P; what is left out is M − P Qᵀ; start summing Q
    wait      Q is there: the sum of all ranks' gradients is about P Qᵀ

Every bucket has its own messages, so it does not matter which bucket's second sum begins first on which rank.

[Note: one P] Orthogonalising the same P on processors of two kinds may differ in the last bits, and the ranks' results
with it. So each rank publishes its own part of the orthogonal P, and all use the parts of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.parallel.compression.codecs import RawCodec
from paceline.parallel.compression.compressed_allreduce import (
    COUNTS_ONCE,
    AllToAllReduce,
    CompressionLoss,
    PacketHeader,
)
from paceline.parallel.compression.exchange_thread import ExchangeThread, PendingExchange
from paceline.parallel.compression.powersgd import PowerSGD
from paceline.parallel.engine.comm import Comm

__all__ = ["TAGS", "PowerSGDAllReduce"]

TAGS = 5
"""How many a `PowerSGDAllReduce` needs."""


class PowerSGDAllReduce:
    """A buffer of matrices that is summed as thin ones; all ranks make theirs in the same order.

    Args:
        comm: the ranks, two or more. courier: of the engine.
        flat: the buffer. views: returns its matrices as they lie in a buffer like it.
        shapes: of the matrices; all are worth it (`lowrank.factors_of`).
        rank, seed: of the thin matrices.
        residual: float32, like `flat`: what was left out; None: what is left out is lost.
        tag: the first of `TAGS` that were reserved.
    """

    def __init__(
        self,
        comm: Comm,
        flat: Tensor,
        views: Callable[[Tensor], Sequence[Tensor]],
        shapes: Sequence[Sequence[int]],
        courier: ExchangeThread,
        *,
        rank: int,
        seed: int,
        residual: Tensor | None,
        tag: int,
    ) -> None:
        self._comm, self._courier, self._flat, self._views = comm, courier, flat, views
        self._residual = residual
        self._given = torch.zeros_like(flat, dtype=torch.float32) if residual is None else residual
        self.low = PowerSGD(shapes, rank, seed=seed, device=flat.device)
        self._p, self._q = (_padded(thin, comm.size) for thin in (self.low.p, self.low.q))
        raw = RawCodec(torch.float32)
        self._sum_p = AllToAllReduce(comm, self._p, raw, courier, tag=tag)
        self._sum_q = AllToAllReduce(comm, self._q, raw, courier, tag=tag + 2)
        self._tag = tag + 4
        self._ticket: PendingExchange | None = None
        self._measure = False
        gathered = (comm.size - 1) * self._p.nbytes // comm.size
        self.sent_nbytes = self._sum_p.sent_nbytes + gathered + self._sum_q.sent_nbytes
        self.error = CompressionLoss()
        self.labels: list[PacketHeader] = []

    def launch(self, label: PacketHeader = COUNTS_ONCE, *, measure: bool = False) -> None:
        """Start summing; see `packets.Parcel`."""
        assert self._ticket is None, "the sum before it was waited for"
        self._measure = measure
        if self._residual is None:
            self._given.copy_(self._flat)
        else:
            self._residual.add_(self._flat)
        if label.weight != 1.0:
            self._given.mul_(label.weight)
        self._p[: self.low.p.numel()].copy_(self.low.project(self._views(self._given)))
        self._sum_p.launch(PacketHeader(1.0, label.note, label.rate))
        self._ticket = self._courier.give(self._second)

    def _second(self) -> None:
        """Go on from the summed P to the sum of Q."""
        self._sum_p.wait()
        self.labels = self._sum_p.labels
        low, matrices = self.low, self._views(self._given)
        low.p.copy_(self._p[: low.p.numel()])
        low.orthogonalise()
        self._p[: low.p.numel()].copy_(low.p)
        self._share(self._p)
        low.p.copy_(self._p[: low.p.numel()])
        self._q[: low.q.numel()].copy_(low.back(matrices))
        self._leave_out(matrices)
        self._sum_q.launch()

    def _share(self, flat: Tensor) -> None:
        """Make `flat` the same on all ranks; see [Note: one P]."""
        rows = flat.view(self._comm.size, -1)
        if rows.device.type != "cpu" and not self._comm.stream_ordered:
            host = rows.cpu()
            self._comm.all_gather_rows(host, self._comm.post_row_receives(host, self._tag), self._tag).wait()
            rows.copy_(host)
            return
        self._comm.all_gather_rows(rows, self._comm.post_row_receives(rows, self._tag), self._tag).wait()

    def _leave_out(self, matrices: Sequence[Tensor]) -> None:
        """Take from the matrices what is sent of them; where that is not finite, nothing is left."""
        given = float(torch.linalg.vector_norm(self._given)) ** 2 if self._measure else 0.0
        sent = torch.zeros_like(self._given)
        self.low.reconstruct(self._views(sent))
        self._given.sub_(sent)
        left = float(torch.linalg.vector_norm(self._given)) ** 2
        if not left < float("inf"):
            self._given.nan_to_num_(0.0, 0.0, 0.0)
        if self._measure:
            self.error = CompressionLoss(left, given)

    def wait(self) -> None:
        """Block until the buffer holds the sum; see `packets.Parcel`."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        ticket.wait()
        self._sum_q.wait()
        self.low.q.copy_(self._q[: self.low.q.numel()])
        if self._flat.dtype == torch.float32:
            self.low.reconstruct(self._views(self._flat))
            return
        wide = torch.zeros_like(self._flat, dtype=torch.float32)
        self.low.reconstruct(self._views(wide))
        self._flat.copy_(wide)


def _padded(thin: Tensor, ranks: int) -> Tensor:
    """Return zeros of at least that many numbers, in parts of 16 for each rank."""
    return thin.new_zeros(-(-thin.numel() // (16 * ranks)) * 16 * ranks)
