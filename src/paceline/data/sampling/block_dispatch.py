"""Who gets which block of the data: round-robin, by shares, or at random; computed, never listed.

The data are a row of samples, cut into blocks of equal size (the last may be short). A `BlockDispatch` says whose
each block is, and which are a rank's own. All of it is arithmetic on numbers of blocks: 10^12 samples take
no more memory than 10^3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from paceline._core.keyed_random import derive_key, keyed_hash
from paceline.data.sampling.rank_shares import RankShares, TurnOrder
from paceline.data.sampling.shuffle import LARGEST, Shuffle
from paceline.errors import UsageError, unknown

__all__ = ["BlockDispatch", "DispatchScheme", "dispatch_blocks"]

DispatchScheme = Literal["round_robin", "random", "shares"]
Numbers = NDArray[np.int64]

COUNTED = 1 << 16
"""Up to so many blocks are drawn one by one; of more, each rank's number is drawn at once."""


class BlockOrder(Protocol):
    """Whose the blocks are, and which are a rank's own."""

    def owners(self, blocks: Numbers) -> Numbers:
        """Return whose each of `blocks` is."""
        ...

    def count(self, rank: int) -> int:
        """Return how many blocks `rank` has."""
        ...

    def nth(self, rank: int, numbers: Numbers) -> Numbers:
        """Return which blocks are the `numbers`-th ones of `rank`, counted from 0."""
        ...


@dataclass(frozen=True)
class RoundRobinOrder:
    """Blocks dealt in turns, as often as each rank's share says."""

    turns: TurnOrder
    blocks: int

    def owners(self, blocks: Numbers) -> Numbers:
        """Return whose each of `blocks` is."""
        return self.turns.owners[blocks % self.turns.period]

    def count(self, rank: int) -> int:
        """Return how many blocks `rank` has."""
        return self.turns.count(rank, self.blocks)

    def nth(self, rank: int, numbers: Numbers) -> Numbers:
        """Return which blocks are the `numbers`-th ones of `rank`."""
        return self.turns.nth(rank, numbers)


@dataclass(frozen=True)
class RandomOrder:
    """Each block drawn for a rank by chance; see [Note: random in constant memory].

    [Note: random in constant memory] To draw each block's owner independently is to draw how many blocks each
    rank gets (multinomial) and then one of all arrangements of them, evenly. So the counts are drawn first.
    Then the blocks are shuffled by a bijection, and rank i owns the places cᵢ … cᵢ₊₁ - 1 of the shuffled row:
    both directions are one evaluation of the bijection.

    The row's last block may be short: whoever owns it gets it last, so that all before it are whole.

    Attributes:
        counts: blocks of each rank.
        shuffle: the arrangement.
    """

    counts: tuple[int, ...]
    shuffle: Shuffle

    @cached_property
    def _ends(self) -> Numbers:
        return np.cumsum(np.array(self.counts, dtype=np.int64))

    def owners(self, blocks: Numbers) -> Numbers:
        """Return whose each of `blocks` is."""
        return np.searchsorted(self._ends, self.shuffle.inverse(blocks), side="right")

    def count(self, rank: int) -> int:
        """Return how many blocks `rank` has."""
        return self.counts[rank]

    def nth(self, rank: int, numbers: Numbers) -> Numbers:
        """Return which blocks are the `numbers`-th ones of `rank`; the row's last block comes last."""
        end = self._ends[rank]
        places, last = end - self.counts[rank] + numbers, self._place_of_last
        if end - self.counts[rank] <= last < end:
            places = np.where(places == last, end - 1, np.where(places == end - 1, last, places))
        return self.shuffle(places)

    @cached_property
    def _place_of_last(self) -> int:
        return int(self.shuffle.inverse(np.array([self.shuffle.size - 1]))[0]) if self.shuffle.size else -1


@dataclass(frozen=True)
class BlockDispatch:
    """Which of `samples` samples, in a row, each rank gets.

    Attributes:
        samples: length of the row, 0 or more.
        shares: how much each rank gets; their number is the number of ranks.
        block: samples that go to one rank together; the row's last block may have fewer.
        scheme: ``"round_robin"`` and ``"shares"`` deal in turns (as often as the share says: at every prefix
            each rank has its share rounded down or up to whole blocks), ``"random"`` by chance.
        seed: of ``"random"``; two seeds give two independent draws.

    Raises:
        UsageError: an unknown scheme, or a number that makes no sense.

    Example:
        >>> dealing = dispatch_blocks(50_000, 7, block=10)
        >>> [dealing.count(rank) for rank in range(7)]
        [7150, 7150, 7140, 7140, 7140, 7140, 7140]
        >>> dealing.owner(8), dealing.block_of(1, 1)
        (1, 8)
    """

    samples: int
    shares: RankShares
    block: int = 1
    scheme: DispatchScheme = "round_robin"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scheme not in get_args(DispatchScheme):
            raise unknown("dispatch scheme", self.scheme, get_args(DispatchScheme))
        if not isinstance(self.samples, int) or not 0 <= self.samples <= LARGEST:
            raise UsageError(f"{self.samples!r} samples", remedy=f"pass a whole number from 0 to {LARGEST}")
        if not isinstance(self.block, int) or not 1 <= self.block <= LARGEST:
            raise UsageError(f"block={self.block!r}", remedy="pass a whole number, 1 or more")

    @property
    def ranks(self) -> int:
        """How many ranks the samples are dealt to."""
        return self.shares.ranks

    @property
    def blocks(self) -> int:
        """How many blocks the row has."""
        return -(-self.samples // self.block)

    # ------------------------------------------------------------------ blocks

    def owner(self, block: int) -> int:
        """Return the rank that gets the `block`-th block, counted from 0.

        Raises:
            UsageError: there is no such block.
        """
        if not 0 <= block < self.blocks:
            raise UsageError(f"block {block} of {self.blocks}", remedy="blocks are counted from 0")
        return int(self._order.owners(np.array([block]))[0])

    def owners(self, blocks: Numbers) -> Numbers:
        """Return the ranks that get `blocks`, each in ``range(self.blocks)``."""
        return self._order.owners(blocks)

    def block_of(self, rank: int, number: int) -> int:
        """Return the `number`-th block of `rank`, counted from 0.

        Raises:
            UsageError: the rank has no such block.
        """
        if not 0 <= number < self.block_count(rank):
            raise UsageError(
                f"block {number} of rank {rank}, which has {self.block_count(rank)}",
                remedy="blocks are counted from 0",
            )
        return int(self._order.nth(rank, np.array([number]))[0])

    def block_count(self, rank: int) -> int:
        """Return how many blocks `rank` gets."""
        if not 0 <= rank < self.ranks:
            raise UsageError(f"rank {rank} of {self.ranks}", remedy="ranks are counted from 0")
        return self._order.count(rank)

    # ------------------------------------------------------------------ samples

    def count(self, rank: int) -> int:
        """Return how many samples `rank` gets."""
        return self._counts[rank]

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return self._counts

    def places(self, rank: int, numbers: Numbers) -> Numbers:
        """Return where in the row the `numbers`-th samples of `rank` stand.

        Args:
            rank: whose.
            numbers: each in ``range(self.count(rank))``.
        """
        if self.block == 1:
            return self._order.nth(rank, numbers)
        blocks, rest = np.divmod(numbers, self.block)
        return self._order.nth(rank, blocks) * self.block + rest

    # ------------------------------------------------------------------ the order of blocks

    @cached_property
    def _order(self) -> BlockOrder:
        if self.scheme != "random":
            return RoundRobinOrder(TurnOrder.of(self.shares), self.blocks)
        counts = draw_block_counts(self.blocks, self.shares, derive_key(self.seed, 1))
        return RandomOrder(counts, Shuffle(self.blocks, derive_key(self.seed, 2)))

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        counts = [self._order.count(rank) * self.block for rank in range(self.ranks)]
        if self.samples:
            counts[self.owner(self.blocks - 1)] -= self.blocks * self.block - self.samples
        return tuple(counts)


def dispatch_blocks(
    samples: int,
    ranks: int,
    *,
    block: int = 1,
    scheme: DispatchScheme = "round_robin",
    shares: Sequence[float] | RankShares | None = None,
    seed: int = 0,
) -> BlockDispatch:
    """Return how `samples` samples are dealt to `ranks` ranks.

    Args:
        samples, block, scheme, seed: as in `BlockDispatch`.
        ranks: how many.
        shares: one a rank, 1 in all; None: all the same. With ``"random"``: the chances.

    Raises:
        UsageError: a value that makes no sense, shares that do not fit, a block larger than the data, or the
            scheme ``"shares"`` without any.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"{ranks!r} ranks", remedy="pass 1 or more")
    if scheme == "shares" and shares is None:
        raise UsageError("dispatch by shares without shares", remedy="pass one share a rank, 1 in all")
    dealing = BlockDispatch(samples, RankShares.of(shares, ranks), block, scheme, seed)
    if 0 < samples < block:
        raise UsageError(
            f"a block of {block} samples is larger than the data ({samples} samples)",
            remedy=f"pass a block of at most {samples}; small ones deal most evenly",
        )
    return dealing


def draw_block_counts(blocks: int, shares: RankShares, key: int) -> tuple[int, ...]:
    """Return how many of `blocks` blocks each rank gets if each is drawn with the chances `shares`.

    Up to 65,536 blocks are drawn one by one. Of more, the ranks' numbers are drawn one after another, each
    binomial given those before it, by its normal limit. What that leaves out is the skew, about 1/√(the
    rank's blocks): 0.01 for a share of .1 or more. Integers throughout, so that all platforms draw the same.
    """
    if blocks <= COUNTED:
        takers = np.flatnonzero(shares.parts)
        ends = np.cumsum(np.array(shares.parts, dtype=object)[takers]) * 2**64 // shares.whole
        upper = np.array([int(end) - 1 for end in ends], dtype=np.uint64)
        drawn = keyed_hash(np.arange(blocks, dtype=np.uint64), key)
        found = np.zeros(shares.ranks, dtype=np.int64)
        found[takers] = np.bincount(np.searchsorted(upper, drawn), minlength=len(takers))
        return tuple(found.tolist())
    counts, left, parts_left = [], blocks, shares.whole
    for part, deviate in zip(shares.parts, _deviates(shares.ranks, key), strict=True):
        counts.append(_binomial(left, part, parts_left, deviate) if part else 0)
        left, parts_left = left - counts[-1], parts_left - part
    return tuple(counts)


def _deviates(number: int, key: int) -> list[int]:
    """Draw normal deviates as whole numbers, of mean 0 and standard deviation 2^33: each a sum of 48 even ones."""
    even = keyed_hash(np.arange(number * 48, dtype=np.uint64), key) >> np.uint64(32)
    return (even.reshape(number, 48).sum(axis=1).astype(np.int64) - 24 * 2**32).tolist()


def _binomial(trials: int, part: int, whole: int, deviate: int) -> int:
    """Return how many of `trials` succeed at the chance part/whole, by the normal limit, in integers."""
    if part == whole:
        return trials
    deviation = math.isqrt(trials * part * (whole - part) << 64)  # in units of 2^-32 / whole
    drawn = (2 * trials * part * 2**64 + deviate * deviation + whole * 2**64) // (2 * whole * 2**64)
    return min(max(drawn, 0), trials)
