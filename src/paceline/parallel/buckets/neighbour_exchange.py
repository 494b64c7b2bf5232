"""Exchanges of ranks that keep a copy of their right neighbour's shard, for live recovery of sharded training.

Rank i of N holds shard i, and updates shard i + 1 too, from the same gradients with the same numbers. So it needs the
sums of two parts, but not the parameters of its neighbour:

    gradients    shared memory: an all-reduce in place of the reduce-scatter
                 otherwise: reduce-scatter, then every owner sends its part to its left neighbour
    parameters   the parts of the other N − 2 ranks

Point to point that is the same traffic as without copies; among two ranks nothing is gathered.

[Note: confirmation] Nobody updates before all ranks have confirmed that they hold both sums. An update needs no other
rank, so from then on a rank that dies takes nothing with it: if one has applied the update, all others can. A rank on
which the confirmation fails can't know whether it has passed elsewhere. So it keeps what the update needs, until the
ranks that are left know of each other how far they are.
"""

from __future__ import annotations

import torch

from paceline.parallel.gradient_collectives import Comm, PendingCollective

__all__ = ["NeighbourExchange"]


class NeighbourExchange:
    """Exchanges of one rank.

    Args:
        comm: the ranks, at least two.

    Attributes:
        left: the rank that keeps a copy of this rank's shard.
        right: the rank whose shard this rank has a copy of.
        local: exchange nothing any more: only what is confirmed is still updated.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.left, self.right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self.local = False
        self._tag_sums, self._tag_gather = comm.reserve_tags(1), comm.reserve_tags(1)
        self._round, self._error = -1, None  # of the latest confirmation

    # ------------------------------------------------------------------ gradients

    def reduce(self, flat: torch.Tensor, *, mean: bool) -> PendingCollective:
        """Start summing (or averaging) `flat` over all ranks; this rank ends with its own and its copy's N-th."""
        if self._comm.backend == "paceline":
            return self._comm.all_reduce(flat, mean=mean)
        return self.pass_on(flat, self._comm.reduce_scatter(flat, mean=mean))

    def pass_on(self, flat: torch.Tensor, reduced: PendingCollective) -> PendingCollective:
        """Complete a reduce-scatter of `flat` by sending this rank's part to its left neighbour.

        Ranks wait for their buckets in the same order, so messages of one tag match.
        """
        comm, parts = self._comm, flat.chunk(self._comm.size)

        def finish() -> None:
            reduced.wait()
            works = [
                comm.receive(parts[self.right], self.right, self._tag_sums),
                comm.send(parts[comm.rank], self.left, self._tag_sums),
            ]
            PendingCollective(works, held=comm.pending).wait()

        return PendingCollective([], finish)

    # ------------------------------------------------------------------ confirmation

    def is_decided(self, step: int) -> bool:
        """Return whether `confirm` was called in a round."""
        return self._round == step

    def confirm(self, step: int) -> Exception | None:
        """Wait until all ranks hold their sums of a round; return why that failed, None if it did not.

        Further calls in the round return the same. See [Note: confirmation].
        """
        if self._round != step:
            self._round, self._error = step, None
            try:
                self._comm.largest(step, torch.device("cpu"))
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not be raised before the update
                self._error = error
        return self._error

    # ------------------------------------------------------------------ parameters

    def all_gather(self, flat: torch.Tensor) -> PendingCollective:
        """Start filling `flat` with the parts of all ranks; the own one and the copy are there.

        In shared memory the copy is overwritten by the same numbers.
        """
        comm = self._comm
        if comm.size == 2:
            return PendingCollective([])
        if comm.backend == "paceline":
            return comm.all_gather(flat)
        parts, tag = flat.chunk(comm.size), self._tag_gather
        works = [comm.receive(parts[peer], peer, tag) for peer in comm.peers if peer != self.right]
        works += [comm.send(parts[comm.rank], peer, tag) for peer in comm.peers if peer != self.left]
        return PendingCollective(works, held=comm.pending)
