"""Samples of each batch of each rank in an epoch, from its start or from where it was interrupted.

A sequence of samples is shuffled, assigned to ranks, and cut into batches. If an epoch is interrupted and continued
by another number of ranks, or with other shares, the remaining samples are a new, shorter sequence, which is assigned
and cut in turn. So an epoch is a stack of layers, each an assignment and the number of samples that every rank has
taken; samples are never listed.

With round-robin, ranks that are equally far have taken a prefix of the sequence: the remaining samples keep their
order, so that other ranks with the same global batch size make the same global batches. Otherwise rank 0's remaining
samples come first, then rank 1's, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from paceline._core.keyed_random import derive_key
from paceline.data.sampling.block_dispatch import BlockDispatch
from paceline.data.sampling.shuffle import MAX_SIZE, Indices, Shuffle
from paceline.data.sampling.uneven_policies import RankPortions
from paceline.errors import UsageError, unknown

__all__ = ["EpochLayer", "EpochPlan", "SampleOrder", "ShuffleMode", "remaining_samples"]

ShuffleMode = Literal["samples", "blocks", "none"]


@dataclass(frozen=True)
class SampleOrder:
    """Order of a dataset's samples in one epoch.

    Attributes:
        samples: size of the dataset.
        shuffle: ``"samples"`` shuffles all samples; ``"blocks"`` shuffles whole blocks and keeps the samples of each
            together, for storage that reads neighbours faster; ``"none"`` keeps the order.
        block: samples per block for ``"blocks"``.
        seed, epoch: each pair gives another order.

    Raises:
        UsageError: the shuffle mode is unknown, or a number out of range.
    """

    samples: int
    shuffle: ShuffleMode = "samples"
    block: int = 1
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.shuffle not in get_args(ShuffleMode):
            raise unknown("shuffle mode", self.shuffle, get_args(ShuffleMode))
        if not 0 <= self.samples <= MAX_SIZE:
            raise UsageError(f"{self.samples} samples", remedy=f"pass a whole number from 0 to {MAX_SIZE}")
        if not 1 <= self.block <= MAX_SIZE:
            raise UsageError(f"block={self.block}", remedy="a block has at least 1 sample")

    def at(self, positions: Indices) -> Indices:
        """Return the samples at `positions`."""
        if self.shuffle == "none":
            return positions
        if self.shuffle == "samples":
            return self._bijection(positions)
        blocks, rest = np.divmod(positions, self.block)
        whole = self.samples // self.block  # a short block stays the last
        inside = blocks < whole
        blocks[inside] = self._bijection(blocks[inside])
        return blocks * self.block + rest

    @cached_property
    def _bijection(self) -> Shuffle:
        size = self.samples // self.block if self.shuffle == "blocks" else self.samples
        return Shuffle(size, derive_key(self.seed, self.epoch, 3))


@dataclass(frozen=True)
class EpochLayer:
    """An assignment of which every rank has used its first samples.

    Attributes:
        dispatch: the assignment.
        taken: per rank, how many of its own samples it has used.
    """

    dispatch: BlockDispatch
    taken: tuple[int, ...]

    @cached_property
    def _ends(self) -> Indices:
        left = [count - taken for count, taken in zip(self.dispatch.counts, self.taken, strict=True)]
        return np.cumsum(np.array(left, dtype=np.int64))

    @cached_property
    def _took_prefix(self) -> bool:
        """True if the ranks have taken a prefix of the sequence; never for a random assignment."""
        taken = replace(self.dispatch, samples=sum(self.taken))
        return self.dispatch.scheme != "random" and taken.counts == self.taken

    @property
    def remaining(self) -> int:
        """Samples that no rank has used."""
        return int(self._ends[-1])

    def positions(self, indices: Indices) -> Indices:
        """Return the positions in this layer's sequence of the remaining samples with these `indices`."""
        if self._took_prefix:
            return indices + sum(self.taken)
        ranks = np.searchsorted(self._ends, indices, side="right")
        positions = np.empty_like(indices)
        for rank in np.unique(ranks):
            mine = ranks == rank
            left = self.dispatch.counts[rank] - self.taken[rank]
            own = indices[mine] - (self._ends[rank] - left) + self.taken[rank]
            positions[mine] = self.dispatch.positions(int(rank), own)
        return positions


@dataclass(frozen=True)
class EpochPlan:
    """Batches of all ranks in the rest of an epoch.

    Attributes:
        order: of all samples.
        layers: earlier assignments, oldest first.
        dispatch: assignment of the remaining samples.
        portions: batches that they are cut into.

    Raises:
        UsageError: an assignment does not cover the samples that remain before it.
    """

    order: SampleOrder
    layers: tuple[EpochLayer, ...]
    dispatch: BlockDispatch
    portions: RankPortions

    def __post_init__(self) -> None:
        for done, dispatch in enumerate([*(layer.dispatch for layer in self.layers), self.dispatch]):
            remaining = remaining_samples(self.order, self.layers[:done])
            if dispatch.samples != remaining:
                raise UsageError(
                    f"an assignment of {dispatch.samples} samples, but {remaining} remain",
                    remedy="assign the remaining samples",
                )

    def samples(self, rank: int, first: int, end: int) -> Indices:
        """Return samples ``first … end - 1`` of `rank`; see `RankPortions.bounds`."""
        indices = np.arange(first, end, dtype=np.int64)
        count = self.dispatch.counts[rank]
        if end > count:
            indices %= count  # repeated, to pad
        positions = self.dispatch.positions(rank, indices)
        for layer in reversed(self.layers):
            positions = layer.positions(positions)
        return self.order.at(positions)

    def batch(self, rank: int, step: int) -> Indices:
        """Return the samples of `rank` in `step`; none after it ran out."""
        return self.samples(rank, *self.portions.bounds(rank, step))

    def after(self, step: int) -> EpochLayer:
        """Return this assignment as a layer of which `step` steps are done."""
        ranks = range(self.dispatch.ranks)
        return EpochLayer(self.dispatch, tuple(self.portions.taken(rank, step) for rank in ranks))


def remaining_samples(order: SampleOrder, layers: Sequence[EpochLayer]) -> int:
    """Return the number of samples that remain after `layers`."""
    return layers[-1].remaining if layers else order.samples
