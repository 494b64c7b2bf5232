"""Batches per rank of dispatched data: starving ranks, the outcome of each uneven-data policy, safe sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from paceline.data.sampling.block_dispatch import BlockDispatch
from paceline.data.sampling.rank_shares import RankShares, TurnOrder
from paceline.data.sampling.uneven_policies import RankPortions, UnevenPolicy
from paceline.errors import UnevenData, UsageError

__all__ = ["BatchBalance", "PolicyOutcome", "is_even", "safe_batch_sizes", "safe_blocks"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PolicyOutcome:
    """An epoch under one policy.

    Attributes:
        policy: its name; ``"none"``: every rank loops over its own batches.
        steps: of the epoch; None if it is refused.
        used: distinct samples that are used.
        dropped: samples that are never used.
        repeated: samples that are used again, counted each time.
        empty: batches of all ranks without a sample.
        moved: gradient weight on the wrong ranks' data, 0 to 1: half the sum over ranks of
            |weight − fraction of the data|. Where ranks' mean gradients differ by at most d, the epoch's mean gradient
            is off by at most ``moved * d``.
        deadlock: whether ranks wait forever for others.
        refused: the error; empty if there is none.
    """

    policy: str
    steps: int | None
    used: int = 0
    dropped: int = 0
    repeated: int = 0
    empty: int = 0
    moved: float = 0.0
    deadlock: bool = False
    refused: str = ""

    @property
    def exact(self) -> bool:
        """Whether every sample is used exactly once."""
        return self.steps is not None and not (self.dropped or self.repeated or self.deadlock)


@dataclass(frozen=True)
class BatchBalance:
    """Dispatched data, cut into batches.

    Attributes:
        dispatch: samples of each rank.
        batch_size: samples of a full batch.
        drop_last: whether a loader without a policy drops the short last batch.
    """

    dispatch: BlockDispatch
    batch_size: int
    drop_last: bool = False

    @cached_property
    def full_batches(self) -> tuple[int, ...]:
        """Full batches of each rank (floor)."""
        return tuple(count // self.batch_size for count in self.dispatch.counts)

    @cached_property
    def all_batches(self) -> tuple[int, ...]:
        """Batches of each rank including a short last one (ceiling)."""
        return tuple(-(-count // self.batch_size) for count in self.dispatch.counts)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches of each rank from a loader without a policy."""
        return self.full_batches if self.drop_last else self.all_batches

    @property
    def starving(self) -> list[tuple[int, int]]:
        """(rank, its batches) of every rank that has fewer batches than another."""
        most = max(self.batches)
        return [(rank, batches) for rank, batches in enumerate(self.batches) if batches < most]

    @property
    def deadlock(self) -> bool:
        """Whether ranks that each loop over their own batches end in a deadlock."""
        return min(self.batches) < max(self.batches)

    def outcome(self, policy: UnevenPolicy) -> PolicyOutcome:
        """Return the outcome under `policy`; every sample has the same weight."""
        counts = self.dispatch.counts
        try:
            portions = RankPortions(counts, self.batch_size, policy)
        except (UnevenData, UsageError) as error:
            return PolicyOutcome(policy=policy, steps=None, refused=str(error).partition("\n")[0])
        served = [portions.bounds(rank, portions.steps - 1)[1] for rank in range(len(counts))]
        return PolicyOutcome(
            policy=policy,
            steps=portions.steps,
            used=portions.used,
            dropped=portions.dropped,
            repeated=portions.repeated,
            empty=portions.empty,
            moved=moved_weight(served, counts),
        )

    @property
    def without_policy(self) -> PolicyOutcome:
        """Outcome of ranks that each loop over their own batches, with equal weight per rank."""
        counts, steps = self.dispatch.counts, min(self.batches)
        used = sum(min(count, steps * self.batch_size) for count in counts)
        weights = [1 if steps else 0] * len(counts)
        return PolicyOutcome(
            policy="none",
            steps=steps,
            used=used,
            dropped=sum(counts) - used,
            moved=moved_weight(weights, counts),
            deadlock=self.deadlock,
        )

    @cached_property
    def outcomes(self) -> list[PolicyOutcome]:
        """Outcomes of all policies, that without a policy first."""
        return [self.without_policy, *(self.outcome(policy) for policy in get_args(UnevenPolicy))]


def moved_weight(weights: Sequence[int], counts: Sequence[int]) -> float:
    """Return the total variation distance of two distributions over ranks, 0 to 1."""
    all_weights, samples = sum(weights), sum(counts)
    if not all_weights or not samples:
        return 0.0
    pairs = zip(weights, counts, strict=True)
    distance = sum(abs(weight * samples - count * all_weights) for weight, count in pairs)
    return distance / (2 * all_weights * samples)


def is_even(counts: Iterable[int], batch_size: int, *, drop_last: bool = False) -> bool:
    """Return whether all ranks have the same number of batches."""
    return bool(safe_batch_sizes(tuple(counts), [batch_size], drop_last=drop_last))


def safe_blocks(
    samples: int, shares: RankShares, batch_size: int, largest: int, *, drop_last: bool = False
) -> list[int]:
    """Return the block sizes, dispatched in turns, for which all ranks have the same number of batches.

    Args:
        samples: of all ranks.
        shares: of the ranks.
        batch_size: samples of a full batch.
        largest: the largest block size to check.
        drop_last: whether the short last batch is dropped.
    """
    turns = TurnOrder.of(shares)
    found = np.arange(1, largest + 1, dtype=np.int64)
    expected = None
    for rank in _ranks_to_check(shares):
        batches = _batches(_counts_in_turns(turns, rank, samples, found), batch_size, drop_last)
        if expected is not None:
            same = batches == expected
            found, batches = found[same], batches[same]
        expected = batches
    return found.tolist()


def _ranks_to_check(shares: RankShares) -> list[int]:
    """Return the ranks to compare, those that differ most first.

    With equal shares the first and the last are enough: no rank has more than the one before it.
    """
    by_part = sorted(range(shares.ranks), key=lambda rank: shares.parts[rank])
    if shares.parts[by_part[0]] == shares.parts[by_part[-1]]:
        return [0, shares.ranks - 1]
    return [by_part[0], by_part[-1], *by_part[1:-1]]


def _counts_in_turns(turns: TurnOrder, rank: int, samples: int, sizes: Numbers) -> Numbers:
    """Return the samples of `rank` for each of the block `sizes`."""
    blocks = -(-samples // sizes)
    short = np.where(turns.owners[(blocks - 1) % turns.period] == rank, blocks * sizes - samples, 0)
    return turns.counts(rank, blocks) * sizes - short


def _batches(counts: Numbers, batch_size: int | Numbers, drop_last: bool) -> Numbers:
    return counts // batch_size if drop_last else -(-counts // batch_size)


def safe_batch_sizes(
    counts: tuple[int, ...], candidates: Iterable[int], *, drop_last: bool = False
) -> list[int]:
    """Return those of the batch sizes `candidates` for which all ranks have the same number of batches."""
    sizes = np.fromiter(candidates, dtype=np.int64)
    ends = np.array([[min(counts)], [max(counts)]])  # more samples never make fewer batches
    fewest, most = _batches(ends, sizes, drop_last)
    return sizes[fewest == most].tolist()
