"""Assigns blocks of data to ranks: round-robin, by shares, or at random; computed, never stored.

A sequence of samples is cut into blocks of equal size (the last may be short). A `BlockDispatch` returns the rank of
each block, and the blocks of each rank. All of it is arithmetic on block numbers: 10^12 samples take no more memory
than 10^3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, get_args

import numpy as np

from paceline._core.keyed_random import derive_key, keyed_hash
from paceline.data.sampling.rank_shares import RankShares, TurnOrder
from paceline.data.sampling.shuffle import MAX_SIZE, Indices, Shuffle
from paceline.errors import UsageError, unknown

__all__ = ["BlockDispatch", "DispatchScheme", "dispatch_blocks", "draw_block_counts"]

DispatchScheme = Literal["round_robin", "random", "shares"]

MAX_DRAWN_BLOCKS = 1 << 16
"""Largest number of blocks that are drawn one by one; of more, the count of each rank is drawn."""


class _BlockOrder(Protocol):
    """Assignment of blocks to ranks."""

    def owners(self, blocks: Indices) -> Indices:
        """Return the ranks of `blocks`."""
        ...

    def count(self, rank: int) -> int:
        """Return the number of blocks of `rank`."""
        ...

    def nth(self, rank: int, indices: Indices) -> Indices:
        """Return the blocks of `rank` with these `indices`, counted from 0."""
        ...


@dataclass(frozen=True)
class _RoundRobinOrder(_BlockOrder):
    """Blocks in turns, as often as each rank's share says."""

    turns: TurnOrder
    blocks: int

    def owners(self, blocks: Indices) -> Indices:
        return self.turns.owners[blocks % self.turns.period]

    def count(self, rank: int) -> int:
        return int(self.turns.counts(rank, np.array(self.blocks)))

    def nth(self, rank: int, indices: Indices) -> Indices:
        return self.turns.nth(rank, indices)


@dataclass(frozen=True)
class _RandomOrder(_BlockOrder):
    """Each block assigned at random; see [Note: random in constant memory].

    [Note: random in constant memory] Drawing each block's rank independently is equivalent to drawing the number of
    blocks of each rank (multinomial) and then one of all arrangements of them, uniformly. So the counts are drawn
    first. Then the blocks are shuffled by a bijection, and rank i owns positions cᵢ … cᵢ₊₁ - 1 of the shuffled order:
    both directions are one evaluation of the bijection.

    The last block may be short: it is its rank's last, so that all blocks before it are whole.

    Attributes:
        counts: blocks of each rank.
        shuffle: the arrangement.
    """

    counts: tuple[int, ...]
    shuffle: Shuffle

    @cached_property
    def _ends(self) -> Indices:
        return np.cumsum(np.array(self.counts, dtype=np.int64))

    def owners(self, blocks: Indices) -> Indices:
        return np.searchsorted(self._ends, self.shuffle.inverse(blocks), side="right")

    def count(self, rank: int) -> int:
        return self.counts[rank]

    def nth(self, rank: int, indices: Indices) -> Indices:
        end = self._ends[rank]
        positions, last = end - self.counts[rank] + indices, self._position_of_last
        if end - self.counts[rank] <= last < end:
            positions = np.where(positions == last, end - 1, np.where(positions == end - 1, last, positions))
        return self.shuffle(positions)

    @cached_property
    def _position_of_last(self) -> int:
        return int(self.shuffle.inverse(np.array([self.shuffle.size - 1]))[0]) if self.shuffle.size else -1


@dataclass(frozen=True)
class BlockDispatch:
    """Assignment of a sequence of samples to ranks, in blocks.

    Attributes:
        samples: length of the sequence, 0 or more.
        shares: of the ranks.
        block: samples per block; the last may have fewer.
        scheme: ``"round_robin"`` and ``"shares"`` take turns (at every prefix each rank has its share rounded down or
            up to whole blocks), ``"random"`` draws.
        seed: of ``"random"``; different seeds give independent draws.

    Raises:
        UsageError: the scheme is unknown, or a number out of range.

    Example:
        >>> dispatch = dispatch_blocks(50_000, 7, block=10)
        >>> dispatch.counts
        (7150, 7150, 7140, 7140, 7140, 7140, 7140)
        >>> dispatch.owner(8), dispatch.block_of(1, 1)
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
        if not isinstance(self.samples, int) or not 0 <= self.samples <= MAX_SIZE:
            raise UsageError(f"{self.samples!r} samples", remedy=f"pass a whole number from 0 to {MAX_SIZE}")
        if not isinstance(self.block, int) or not 1 <= self.block <= MAX_SIZE:
            raise UsageError(f"block={self.block!r}", remedy="pass a whole number, 1 or more")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.shares.ranks

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.samples // self.block)

    # ------------------------------------------------------------------ blocks

    def owner(self, block: int) -> int:
        """Return the rank of a block, counted from 0.

        Raises:
            UsageError: there is no such block.
        """
        if not 0 <= block < self.blocks:
            raise UsageError(f"block {block} of {self.blocks}", remedy="blocks are counted from 0")
        return int(self._order.owners(np.array([block]))[0])

    def owners(self, blocks: Indices) -> Indices:
        """Return the ranks of `blocks`, each in ``range(self.blocks)``."""
        return self._order.owners(blocks)

    def block_of(self, rank: int, index: int) -> int:
        """Return the block of `rank` with this index, counted from 0.

        Raises:
            UsageError: the rank has no such block.
        """
        if not 0 <= index < self.block_count(rank):
            raise UsageError(
                f"block {index} of rank {rank}, which has {self.block_count(rank)}",
                remedy="blocks are counted from 0",
            )
        return int(self._order.nth(rank, np.array([index]))[0])

    def block_count(self, rank: int) -> int:
        """Return the number of blocks of `rank`."""
        if not 0 <= rank < self.ranks:
            raise UsageError(f"rank {rank} of {self.ranks}", remedy="ranks are counted from 0")
        return self._order.count(rank)

    # ------------------------------------------------------------------ samples

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Samples of each rank."""
        counts = [self._order.count(rank) * self.block for rank in range(self.ranks)]
        if self.samples:
            counts[self.owner(self.blocks - 1)] -= self.blocks * self.block - self.samples
        return tuple(counts)

    def positions(self, rank: int, indices: Indices) -> Indices:
        """Return the positions of samples of `rank` in the sequence.

        Args:
            rank: the rank.
            indices: of its samples, each in ``range(self.counts[rank])``.
        """
        if self.block == 1:
            return self._order.nth(rank, indices)
        blocks, rest = np.divmod(indices, self.block)
        return self._order.nth(rank, blocks) * self.block + rest

    @cached_property
    def _order(self) -> _BlockOrder:
        if self.scheme != "random":
            return _RoundRobinOrder(TurnOrder.of(self.shares), self.blocks)
        counts = draw_block_counts(self.blocks, self.shares, derive_key(self.seed, 1))
        return _RandomOrder(counts, Shuffle(self.blocks, derive_key(self.seed, 2)))


def dispatch_blocks(
    samples: int,
    ranks: int,
    *,
    block: int = 1,
    scheme: DispatchScheme = "round_robin",
    shares: Sequence[float] | RankShares | None = None,
    seed: int = 0,
) -> BlockDispatch:
    """Return the assignment of `samples` samples to `ranks` ranks.

    Args:
        samples, block, scheme, seed: as in `BlockDispatch`.
        ranks: number of ranks.
        shares: one per rank, with sum 1; None: equal ones. With ``"random"``: the probabilities.

    Raises:
        UsageError: a value is invalid, the shares do not match the ranks, a block is larger than the data, or the
            scheme is ``"shares"`` without shares.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"{ranks!r} ranks", remedy="pass 1 or more")
    if scheme == "shares" and shares is None:
        raise UsageError("dispatch by shares without shares", remedy="pass one share per rank, with sum 1")
    dispatch = BlockDispatch(samples, RankShares.of(shares, ranks), block, scheme, seed)
    if 0 < samples < block:
        raise UsageError(
            f"a block of {block} samples is larger than the data ({samples} samples)",
            remedy=f"pass a block of at most {samples}; small ones balance best",
        )
    return dispatch


def draw_block_counts(blocks: int, shares: RankShares, key: int) -> tuple[int, ...]:
    """Return the number of blocks of each rank if each block is drawn with the probabilities `shares`.

    Up to 65,536 blocks are drawn one by one. Of more, the counts of the ranks are drawn in turn, each binomial given
    those before it, by the normal approximation. That omits the skew, about 1/√(the rank's blocks): 0.01 for a share
    of .1 or more. Integers throughout, so that all platforms draw the same.
    """
    if blocks <= MAX_DRAWN_BLOCKS:
        takers = np.flatnonzero(shares.parts)
        ends = np.cumsum(np.array(shares.parts, dtype=object)[takers]) * 2**64 // shares.whole
        upper = np.array([int(end) - 1 for end in ends], dtype=np.uint64)
        drawn = keyed_hash(np.arange(blocks, dtype=np.uint64), key)
        found = np.zeros(shares.ranks, dtype=np.int64)
        found[takers] = np.bincount(np.searchsorted(upper, drawn), minlength=len(takers))
        return tuple(found.tolist())
    counts, left, parts_left = [], blocks, shares.whole
    for part, deviate in zip(shares.parts, _normal_deviates(shares.ranks, key), strict=True):
        counts.append(_draw_binomial(left, part, parts_left, deviate) if part else 0)
        left, parts_left = left - counts[-1], parts_left - part
    return tuple(counts)


def _normal_deviates(number: int, key: int) -> list[int]:
    """Draw normal deviates as integers, of mean 0 and standard deviation 2^33: each a sum of 48 uniform ones."""
    uniform = keyed_hash(np.arange(number * 48, dtype=np.uint64), key) >> np.uint64(32)
    return (uniform.reshape(number, 48).sum(axis=1).astype(np.int64) - 24 * 2**32).tolist()


def _draw_binomial(trials: int, part: int, whole: int, deviate: int) -> int:
    """Return the successes in `trials` with probability part/whole, by the normal approximation, in integers."""
    if part == whole:
        return trials
    deviation = math.isqrt(trials * part * (whole - part) << 64)  # in units of 2^-32 / whole
    drawn = (2 * trials * part * 2**64 + deviate * deviation + whole * 2**64) // (2 * whole * 2**64)
    return min(max(drawn, 0), trials)
