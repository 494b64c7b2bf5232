"""One epoch: which samples make each batch of each rank, from the beginning or from where it was left.

A row of places is shuffled (which sample stands where), dealt to ranks, and cut into batches. Where ranks
stop in the middle and go on as another number of ranks, or with other shares, what is left over is a new,
shorter row. That row is dealt and cut in turn. So an epoch is a pile of layers, each a dealing and how much of it
every rank has taken, and no list of samples anywhere.

Dealt in turns, ranks that are equally far have taken the row's beginning: what is left is the rest of the row, in its
order, so that other ranks with the same global batch make the batches that these would have made. Otherwise it is
rank 0's rest, then rank 1's, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from paceline._core.keyed_random import derive_key
from paceline.data.sampling.block_dispatch import BlockDispatch
from paceline.data.sampling.shuffle import LARGEST, Shuffle
from paceline.data.sampling.uneven_policies import RankPortions
from paceline.errors import UsageError, unknown

__all__ = ["EpochLayer", "EpochPlan", "SampleOrder", "ShuffleMode", "left_of"]

Numbers = NDArray[np.int64]
ShuffleMode = Literal["samples", "blocks", "none"]


@dataclass(frozen=True)
class SampleOrder:
    """All samples of a dataset, in the order of one epoch.

    Attributes:
        samples: how many.
        shuffle: ``"samples"`` puts every sample anywhere; ``"blocks"`` shuffles whole blocks and leaves the
            samples of each together, for storage that reads neighbours faster; ``"none"`` keeps the order.
        block: samples of a block, where blocks are shuffled.
        seed, epoch: another epoch, or seed, is another order.

    Raises:
        UsageError: an unknown shuffle mode, or a number that makes no sense.
    """

    samples: int
    shuffle: ShuffleMode = "samples"
    block: int = 1
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.shuffle not in get_args(ShuffleMode):
            raise unknown("shuffle mode", self.shuffle, get_args(ShuffleMode))
        if not 0 <= self.samples <= LARGEST:
            raise UsageError(f"{self.samples} samples", remedy=f"pass a whole number from 0 to {LARGEST}")
        if not 1 <= self.block <= LARGEST:
            raise UsageError(f"block={self.block}", remedy="a block has at least 1 sample")

    def at(self, places: Numbers) -> Numbers:
        """Return which samples stand at `places`."""
        if self.shuffle == "none":
            return places
        if self.shuffle == "samples":
            return self._bijection(places)
        blocks, rest = np.divmod(places, self.block)
        whole = self.samples // self.block  # the short block, if there is one, stays the last
        inside = blocks < whole
        blocks[inside] = self._bijection(blocks[inside])
        return blocks * self.block + rest

    @cached_property
    def _bijection(self) -> Shuffle:
        size = self.samples // self.block if self.shuffle == "blocks" else self.samples
        return Shuffle(size, derive_key(self.seed, self.epoch, 3))


@dataclass(frozen=True)
class EpochLayer:
    """A row that was dealt, of which every rank has taken its first samples.

    Attributes:
        dealing: of the row.
        taken: per rank, how many of its own samples it has used.
    """

    dealing: BlockDispatch
    taken: tuple[int, ...]

    @cached_property
    def _ends(self) -> Numbers:
        left = [count - taken for count, taken in zip(self.dealing.counts, self.taken, strict=True)]
        return np.cumsum(np.array(left, dtype=np.int64))

    @cached_property
    def _took_the_beginning(self) -> bool:
        """Whether what the ranks took is the beginning of the row; by chance it never is."""
        taken = replace(self.dealing, samples=sum(self.taken))
        return self.dealing.scheme != "random" and tuple(taken.counts) == self.taken

    @property
    def left(self) -> int:
        """Samples that no rank has used."""
        return int(self._ends[-1])

    def places(self, numbers: Numbers) -> Numbers:
        """Return where in this layer's row the samples stand that have these `numbers` in the rest."""
        if self._took_the_beginning:
            return numbers + sum(self.taken)
        ranks = np.searchsorted(self._ends, numbers, side="right")
        places = np.empty_like(numbers)
        for rank in np.unique(ranks):
            mine = ranks == rank
            left = self.dealing.count(rank) - self.taken[rank]
            own = numbers[mine] - (self._ends[rank] - left) + self.taken[rank]
            places[mine] = self.dealing.places(int(rank), own)
        return places


@dataclass(frozen=True)
class EpochPlan:
    """The batches of all ranks in what is left of an epoch.

    Attributes:
        row: all samples.
        layers: what was done before, oldest first.
        dealing: how the rest is dealt.
        portions: how that is cut into batches.

    Raises:
        UsageError: a dealing, of a layer or of the rest, is not one of what was left before it.
    """

    row: SampleOrder
    layers: tuple[EpochLayer, ...]
    dealing: BlockDispatch
    portions: RankPortions

    def __post_init__(self) -> None:
        for done, dealing in enumerate([*(layer.dealing for layer in self.layers), self.dealing]):
            left = left_of(self.row, self.layers[:done])
            if dealing.samples != left:
                raise UsageError(
                    f"a dealing of {dealing.samples} samples, where {left} are left",
                    remedy="deal what is left",
                )

    def samples(self, rank: int, first: int, end: int) -> Numbers:
        """Return which samples `rank` takes as its `first`-th to ``end - 1``-th; see `RankPortions.bounds`."""
        numbers = np.arange(first, end, dtype=np.int64)
        count = self.dealing.count(rank)
        if end > count:
            numbers %= count  # repeated, to pad
        places = self.dealing.places(rank, numbers)
        for layer in reversed(self.layers):
            places = layer.places(places)
        return self.row.at(places)

    def batch(self, rank: int, step: int) -> Numbers:
        """Return which samples `rank` takes in `step`; none where it ran dry."""
        return self.samples(rank, *self.portions.bounds(rank, step))

    def after(self, step: int) -> EpochLayer:
        """Return this epoch's dealing as a layer of which `step` steps are done."""
        ranks = range(self.dealing.ranks)
        return EpochLayer(self.dealing, tuple(self.portions.taken(rank, step) for rank in ranks))


def left_of(row: SampleOrder, layers: Sequence[EpochLayer]) -> int:
    """Return how many samples of `row` are left after `layers`."""
    return layers[-1].left if layers else row.samples
