"""Partial sums of a rank's virtual ranks: gradients of finished leaves that wait for the rest of their subtree.

The rank computes its leaves one after the other. A finished leaf leaves the buckets; two neighbouring subtrees are
added as soon as both are there, so that of L leaves at most log₂ L + 1 partial sums wait, each as large as the
gradients. The last leaf stays in the buckets: while they are launched, what completes its subtree is added to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline._core.summation_tree import are_siblings
from paceline.parallel.buckets.bucket import Bucket

__all__ = ["PartialSums"]


class PartialSums:
    """The partial sums of one rank.

    Args:
        leaves: that the rank computes.
        virtual_ranks: leaves of the whole tree.
    """

    def __init__(self, leaves: range, virtual_ranks: int) -> None:
        self._leaves, self._virtual_ranks = leaves, virtual_ranks
        self._subtrees: list[range] = []
        self._sums: list[list[torch.Tensor]] = []  # of each subtree, a buffer per bucket
        self._unused: list[list[torch.Tensor]] = []
        self._to_add = 0  # subtrees at the end that the last leaf completes

    def keep(self, buckets: Sequence[Bucket], leaf: int) -> None:
        """Take the gradients of a finished leaf out of the buckets."""
        self._subtrees.append(range(leaf, leaf + 1))
        held = [bucket.flat for bucket in buckets if bucket.slots]
        if self._joins_last_two():
            self._add(self._sums[-1], held)
        else:
            if not self._unused:
                self._unused.append([torch.empty_like(flat) for flat in held])
            own = self._unused.pop()
            torch._foreach_copy_(own, held)
            self._sums.append(own)
        while self._joins_last_two():
            completed = self._sums.pop()
            self._add(self._sums[-1], completed)
            self._unused.append(completed)

    def _joins_last_two(self) -> bool:
        """Join the last two subtrees if they are the halves of one."""
        if len(self._subtrees) < 2:
            return False
        left, right = self._subtrees[-2:]
        if not are_siblings(left, right, self._virtual_ranks):
            return False
        del self._subtrees[-2:]
        self._subtrees.append(range(left.start, right.stop))
        return True

    @staticmethod
    def _add(total: Sequence[torch.Tensor], addend: Sequence[torch.Tensor]) -> None:
        torch._foreach_add_(list(total), list(addend))

    def begin_last(self) -> None:
        """Prepare for the last leaf of the step."""
        before = len(self._subtrees)
        self._subtrees.append(range(self._leaves.stop - 1, self._leaves.stop))
        while self._joins_last_two():
            pass
        self._subtrees.pop()
        self._to_add = before - len(self._subtrees)

    def complete(self, bucket: Bucket) -> None:
        """Add to a bucket with the last leaf's gradients what completes their subtree."""
        for sums in reversed(self._sums[len(self._sums) - self._to_add :]):
            bucket.grads.add_(sums[bucket.index][: bucket.grads.numel()])

    def others(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the buffers of the other subtrees that this rank sends, from left to right."""
        return [sums[bucket.index] for sums in self._sums[: len(self._sums) - self._to_add]]

    def clear(self) -> None:
        """Forget all partial sums; their memory is used for the next ones."""
        self._unused += self._sums
        self._subtrees, self._sums, self._to_add = [], [], 0
