"""PowerSGD's arithmetic: a gradient matrix as the product of two thin ones; who sends them is not known here.

Vogels et al., arXiv 1905.13727, algorithm 1, for the matrices M of one bucket, with one collective between the lines::

    P ← M Q                       sum P over ranks
    P ← orthogonalise(P)          Q ← Mᵀ P                       sum Q over ranks (and divide, for the mean)
    M̂ ← P Qᵀ

All P of a bucket lie in one buffer and all Q in another, so that there are two collectives a bucket, always in the same
order. Q stays for the next step: M changes slowly, so each step goes on with the power iteration of those before.
Error feedback is for the caller: M − M̂ is added to the next M.

[Note: the same on all ranks] Every rank orthogonalises the same summed P. Equal bytes, equally aligned, make equal
bytes on processors of one kind; where ranks run on different kinds, one rank's P must be sent to the others, or their
M̂ differ in the last bits. The first Q is drawn as uniform numbers, which need no library's sine or logarithm.

[Note: Qᵀ] Q is kept transposed, rank × columns: both products with M then read M along its rows, which is much faster
on a CPU than ``M.T @ P``.

[Note: rank deficient] Householder's QR gives orthonormal columns whatever P is, also when its rank is less than its
columns, or when it is zero. So a Q that became zero (a step without gradient) comes to life again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import UsageError

__all__ = ["LowRankMatrix", "MatrixSplit", "PowerSGD", "as_matrix", "factors_of"]


@dataclass(frozen=True)
class LowRankMatrix:
    """One tensor that is sent as two thin matrices.

    Attributes:
        index: among the tensors of its bucket.
        rows, columns: of the tensor as a matrix. rank: columns of P and Q.
        p_start, q_start: where its P (rows × rank) and its Qᵀ (rank × columns) begin in the packed buffers.
    """

    index: int
    rows: int
    columns: int
    rank: int
    p_start: int
    q_start: int


@dataclass(frozen=True)
class MatrixSplit:
    """Which tensors of a bucket are sent as thin matrices, and where those lie.

    Attributes:
        thin: those. raw: indices of the others, which are sent as they are.
        p_numel, q_numel: numbers in the packed buffers.
    """

    thin: tuple[LowRankMatrix, ...]
    raw: tuple[int, ...]
    p_numel: int
    q_numel: int


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a view as [shape[0], everything else]."""
    return tensor.view(tensor.shape[0], -1)


def factors_of(shapes: Sequence[Sequence[int]], rank: int, min_ratio: float = 2.0) -> MatrixSplit:
    """Decide which tensors are worth it: those with rows × columns > min_ratio × (rows + columns) × rank.

    Args:
        shapes: of the tensors of a bucket. rank: at most this many columns; never more than a matrix has of rows or
            columns. min_ratio: how many times fewer numbers must be sent.

    Raises:
        UsageError: a rank below 1, or a ratio that is not above 0.

    Example:
        >>> factors_of([(64, 3, 5, 5), (64,)], rank=2).raw
        (1,)
    """
    if rank < 1 or not min_ratio > 0:
        raise UsageError(
            f"rank={rank}, min_ratio={min_ratio}", remedy="use a rank from 1 and a ratio above 0"
        )
    thin: list[LowRankMatrix] = []
    raw: list[int] = []
    p_numel = q_numel = 0
    for index, shape in enumerate(shapes):
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        columns_kept = min(rank, rows, columns)
        if rows * columns > min_ratio * (rows + columns) * columns_kept:
            thin.append(LowRankMatrix(index, rows, columns, columns_kept, p_numel, q_numel))
            p_numel, q_numel = p_numel + rows * columns_kept, q_numel + columns * columns_kept
        else:
            raw.append(index)
    return MatrixSplit(tuple(thin), tuple(raw), p_numel, q_numel)


class PowerSGD:
    """The packed P and Q of one bucket, and what turns matrices into them and back.

    Every method takes all tensors of the bucket, in the order of the shapes, and leaves out those that are sent raw.
    Call `project`, `orthogonalise`, `back`, `reconstruct` in this order, with the sums over ranks in between.

    Args:
        shapes, rank: see `factors_of`.
        seed: of the first Q; the same on all ranks.
        device: where the tensors are.

    Attributes:
        factors: which tensors, and where. p, q: the packed buffers, float32.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        rank: int = 4,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.factors = factors_of(shapes, rank)
        generator = torch.Generator().manual_seed(seed)
        first = torch.rand(self.factors.q_numel, generator=generator).mul_(2).sub_(1)
        self._first = first.to(device)
        self.q = self._first.clone()
        self.p = torch.zeros(self.factors.p_numel, dtype=torch.float32, device=device)

    @torch.no_grad()
    def project(self, tensors: Sequence[Tensor]) -> Tensor:
        """Write P = M Q and return all of it, packed. A Q that is not finite anywhere begins anew there."""
        torch.where(self.q.isfinite(), self.q, self._first, out=self.q)
        for thin, p, q in self._views():
            torch.mm(as_matrix(tensors[thin.index]), q.t(), out=p)
        return self.p

    @torch.no_grad()
    def orthogonalise(self) -> None:
        """Replace each P by an orthonormal base of its columns' space; see [Note: rank deficient]."""
        for _, p, _ in self._views():
            p.copy_(torch.linalg.qr(p).Q)

    @torch.no_grad()
    def back(self, tensors: Sequence[Tensor]) -> Tensor:
        """Write Q = Mᵀ P and return all of it, packed; see [Note: Qᵀ]."""
        for thin, p, q in self._views():
            torch.mm(p.t(), as_matrix(tensors[thin.index]), out=q)
        return self.q

    @torch.no_grad()
    def reconstruct(self, into: Sequence[Tensor]) -> None:
        """Write M̂ = P Qᵀ."""
        for thin, p, q in self._views():
            torch.mm(p, q, out=as_matrix(into[thin.index]))

    def thin_q(self) -> list[Tensor]:
        """Return each thin tensor's Q, flattened, in the order of `factors.thin`."""
        return [q.view(-1) for _, _, q in self._views()]

    def _views(self) -> list[tuple[LowRankMatrix, Tensor, Tensor]]:
        """Return each tensor's part of the packed buffers: its P, and its Qᵀ."""
        views = []
        for thin in self.factors.thin:
            p = self.p[thin.p_start : thin.p_start + thin.rows * thin.rank].view(thin.rows, thin.rank)
            q = self.q[thin.q_start : thin.q_start + thin.columns * thin.rank].view(thin.rank, thin.columns)
            views.append((thin, p, q))
        return views
