"""Sums over virtual ranks along their fixed tree, whichever ranks hold the partial sums.

Where every rank holds one subtree and the backend adds along the tree of its ranks, that is one ordinary collective.
Otherwise every rank sends each other rank that rank's part of all its partial sums, adds up its own part along the
tree, and returns the result: with p partial sums p(N-1)/N of the buffer out, and once more (N-1)/N for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline._core.summation_tree import addition_order, leaves_of, splits_evenly, whole_subtrees
from paceline.parallel.gradient_collectives import Comm, PendingCollective

__all__ = ["TreeSum"]


class TreeSum:
    """Sums the partial sums of all ranks.

    Args:
        comm: the ranks.
        virtual_ranks: leaves of the tree.

    Attributes:
        exchanges: whether parts of partial sums are exchanged; their buffers then divide into a part per rank.
    """

    def __init__(self, comm: Comm, virtual_ranks: int) -> None:
        self._comm = comm
        subtrees = [
            whole_subtrees(leaves_of(rank, comm.size, virtual_ranks), virtual_ranks)
            for rank in range(comm.size)
        ]
        self._counts = list(map(len, subtrees))
        self._additions = addition_order([each for held in subtrees for each in held], virtual_ranks)
        in_order = comm.sums_along_tree and splits_evenly(comm.size, virtual_ranks)
        self.exchanges = comm.size > 1 and not in_order
        self._tag = comm.reserve_tags(2) if self.exchanges else 0

    def all_reduce(self, partial: Sequence[torch.Tensor]) -> PendingCollective:
        """Start summing the partial sums of all ranks; the result goes into this rank's last one.

        Args:
            partial: this rank's, from left to right: 1-D, of equal lengths. They are overwritten.
        """
        flat = partial[-1]
        if self._comm.size == 1:
            return PendingCollective([])
        if not self.exchanges:
            return self._comm.all_reduce(flat)
        rows, tag = flat.view(self._comm.size, -1), self._tag + 1
        posted = self._comm.post_row_receives(rows, tag)

        def gather() -> None:
            self._comm.all_gather_rows(rows, posted, tag).wait()

        return self._exchange(partial, gather)

    def reduce_scatter(self, partial: Sequence[torch.Tensor]) -> PendingCollective:
        """Start summing; each rank ends with its N-th of the result, in its last partial sum. Args as above."""
        if not self.exchanges:
            return self._comm.reduce_scatter(partial[-1])
        return self._exchange(partial, lambda: None)

    def _exchange(self, partial: Sequence[torch.Tensor], then: Callable[[], None]) -> PendingCollective:
        """Exchange the ranks' parts of all partial sums; on completion add up this rank's part."""
        comm, result = self._comm, partial[-1].chunk(self._comm.size)[self._comm.rank]
        works, parts = (self._send_in_one if comm.queues(result) else self._send_each)(partial)

        def finish() -> None:
            for left, right in self._additions:
                parts[left].add_(parts[right])
            if parts[0] is not result:
                result.copy_(parts[0])
            then()

        return PendingCollective(works, finish, comm.pending)

    def _send_each(self, partial: Sequence[torch.Tensor]) -> tuple[list[dist.Work], list[torch.Tensor]]:
        """Exchange parts point to point; return pending messages, and this rank's part of all, in order."""
        comm, works, parts = self._comm, [], []
        chunks = [each.chunk(comm.size) for each in partial]
        for rank, count in enumerate(self._counts):
            own = chunks[0][comm.rank]
            parts.append([each[comm.rank] for each in chunks] if rank == comm.rank else None)
            parts[-1] = parts[-1] or [torch.empty_like(own) for _ in range(count)]
        for peer in comm.peers:
            works += [comm.receive(part, peer, self._tag) for part in parts[peer]]
        for peer in comm.peers:
            works += [comm.send(each[peer], peer, self._tag) for each in chunks]
        return works, [part for held in parts for part in held]

    def _send_in_one(self, partial: Sequence[torch.Tensor]) -> tuple[list[dist.Work], list[torch.Tensor]]:
        """Exchange parts by one call on a stream; return as `_send_each`."""
        comm, own = self._comm, len(partial)
        length = partial[0].numel() // comm.size
        sent = torch.stack([each.view(comm.size, length) for each in partial], dim=1).view(-1)
        received = sent.new_empty(sum(self._counts) * length)
        work = dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=[count * length for count in self._counts],
            input_split_sizes=[own * length] * comm.size,
            group=comm.group,
            async_op=True,
        )
        return [work] if work is not None else [], list(received.view(-1, length))
